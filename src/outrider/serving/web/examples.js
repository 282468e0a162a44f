// Prompts to begin with: text to repeat gains most from drafts, open questions least.

const CODE = `def total(prices, tax):
    result = 0
    for price in prices:
        result = result + price
    result = result * (1 + tax)
    return result


def average(prices):
    if len(prices) == 0:
        return 0
    return total(prices, 0) / len(prices)`;

const PEOPLE = `[
  {"id": 101, "name": "Ada Lovelace", "city": "London", "active": true},
  {"id": 102, "name": "Alan Turing", "city": "Manchester", "active": false}
]`;

export const EXAMPLES = [
  {
    title: "JSON, one key a line",
    prompt: `Write the whole JSON list again, with one key per line.\n\n${PEOPLE}`,
  },
  {
    title: "Code edit, with a prediction",
    prompt: `Rename "prices" to "amounts" everywhere and write the whole code again.\n\n${CODE}`,
    prediction: CODE,
  },
  { title: "Open question", prompt: "Explain tides in two sentences." },
];
