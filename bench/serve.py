"""The server against the Python API: the same chats, streamed and from `LLM.chat`, in turns.

    python bench/serve.py                                  # plain decoding, batch 8: a minute
    python bench/serve.py --speculative-config auto --batch 1 8 16 --rounds 9

Plain decoding says most often so little that the server adds most to it. Both sides answer
`--batch` chats at once on the same CPUs. The client is on them too: it looks for news
every few milliseconds. Rates are tokens per second
from the first call to the last token, medians over --rounds. The last line is
{"<batch>": {"python": …, "server": …, "ratio": …}}.
"""

import argparse
import json
from statistics import median
from time import perf_counter

from common import DEFAULT_PROMPTS, count, provenance, read_prompts
from load import CHAT, ServerProcess, call_together, chat_body

from outrider import LLM, SamplingParams
from outrider.cli.options import parse_speculative_config

WARM_UP = 2  # rounds that do not count


def main() -> None:
    given = _arguments()
    config = parse_speculative_config(given.speculative_config)
    prompts = read_prompts([DEFAULT_PROMPTS], max(given.batch))
    chats = [prompt.conversation for prompt in prompts]
    chats = [chats[i % len(chats)] for i in range(max(given.batch))]
    params = SamplingParams(temperature=0, max_tokens=given.max_tokens, ignore_eos=True)
    with ServerProcess("--speculative-config", given.speculative_config) as server:
        llm = LLM(speculative_config=config)
        found = {}
        for batch in given.batch:
            rates: dict[str, list[float]] = {"python": [], "server": []}
            for number in range(WARM_UP + given.rounds):
                asked = chats[:batch]
                texts, rate = _python(llm, asked, params)
                same, other = _served(server.port, asked, given.max_tokens)
                assert texts == same, "the server says something else"
                if number >= WARM_UP:
                    rates["python"].append(rate)
                    rates["server"].append(other)
            ratios = [b / a for a, b in zip(*rates.values(), strict=True)]
            medians = {name: round(median(values), 1) for name, values in rates.items()}
            found[str(batch)] = medians | {"ratio": round(median(ratios), 3)}
            print(f"batch {batch}: {found[str(batch)]}, ratios {min(ratios):.3f} to "
                  f"{max(ratios):.3f}", flush=True)  # fmt: skip
    if given.output:
        told = {"provenance": provenance(), "settings": vars(given), "rates": found}
        given.output.write(json.dumps(told, default=str, indent=1))
    print(json.dumps(found))


def _python(
    llm: LLM, chats: list[list[dict[str, str]]], params: SamplingParams
) -> tuple[list[str], float]:
    start = perf_counter()
    outputs = llm.chat(chats, params)
    seconds = perf_counter() - start
    count = sum(len(output.outputs[0].token_ids) for output in outputs)
    return [output.outputs[0].text for output in outputs], count / seconds


def _served(
    port: int, chats: list[list[dict[str, str]]], max_tokens: int
) -> tuple[list[str], float]:
    bodies = [chat_body(chat, max_tokens, temperature=0) for chat in chats]
    start = perf_counter()
    replies = call_together(port, CHAT, bodies)
    seconds = max(reply.pieces[-1][0] for reply in replies) - start
    texts = [
        "".join(event["choices"][0]["delta"].get("content", "") for _, event in reply.events())
        for reply in replies
    ]
    return texts, len(chats) * max_tokens / seconds


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=count, nargs="+", default=[8])
    parser.add_argument("--rounds", type=count, default=7)
    parser.add_argument("--max-tokens", type=count, default=256)
    parser.add_argument("--speculative-config", default="none")
    parser.add_argument("-o", "--output", type=argparse.FileType("w"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
