// Begins: views by the address, theme, key, and what the server has.

import { get, setKey } from "./api.js";
import { byId, el } from "./dom.js";
import { follow, startLive } from "./live.js";
import { know } from "./palette.js";
import { offer, startPlayground } from "./playground.js";

const VIEWS = ["playground", "live"];
const THEME = "outrider-theme"; // in localStorage: a taste, nothing secret

function showView() {
  const wanted = location.hash.slice(1);
  const view = VIEWS.includes(wanted) ? wanted : VIEWS[0];
  for (const name of VIEWS) {
    byId(name).hidden = name !== view;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view === "live" ? "Live" : "Playground"} · outrider`;
  follow();
}

function startTheme() {
  const select = byId("theme");
  const use = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  };
  try {
    select.value = localStorage.getItem(THEME) ?? "";
  } catch {
    select.value = ""; // storage is not allowed here
  }
  use(select.value);
  select.addEventListener("change", () => {
    use(select.value);
    try {
      localStorage.setItem(THEME, select.value);
    } catch {
      // The choice lasts as long as the page then.
    }
  });
}

/** Ask what is served; again when the key changes. */
async function meet() {
  try {
    const [models, live] = await Promise.all([get("v1/models"), get("live")]);
    know(live.sources.map((source) => source.name));
    offer(models.data.map((model) => model.id), live.sources);
    const [model] = models.data;
    byId("served").replaceChildren(el("strong", {}, model.id),
      ` · ${model.max_model_len.toLocaleString("en")} tokens of context`);
  } catch (error) {
    const why = error.status === 401 ? "This server wants an API key." : `${error.message}.`;
    byId("served").textContent = why;
  }
}

startTheme();
startPlayground();
startLive();
byId("key").addEventListener("change", (event) => {
  setKey(event.target.value);
  meet();
});
addEventListener("hashchange", showView);
showView();
meet();
