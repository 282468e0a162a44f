"""Prompts of the demo: real tasks of different kinds that a 135 M model can do."""

from outrider.cli.prompts import PromptRecord

CODE = """\
def read_orders(path):
    orders = []
    with open(path) as handle:
        for line in handle:
            parts = line.strip().split(",")
            order = {"id": int(parts[0]), "customer": parts[1], "amount": float(parts[2])}
            orders.append(order)
    return orders


def total_by_customer(orders):
    totals = {}
    for order in orders:
        customer = order["customer"]
        totals[customer] = totals.get(customer, 0.0) + order["amount"]
    return totals
"""

RECORDS = """\
[
  {"id": 101, "name": "Ada Lovelace", "city": "London", "active": true},
  {"id": 102, "name": "Alan Turing", "city": "Manchester", "active": false},
  {"id": 103, "name": "Grace Hopper", "city": "New York", "active": true},
  {"id": 104, "name": "Edsger Dijkstra", "city": "Rotterdam", "active": false}
]"""

NOTICE = """\
The harbour office announces that the ferry to Great Island will not run between Monday the 4th \
and Friday the 8th of March, because the landing stage is being repaired. Passengers who hold a \
ticket for one of these days can travel with the mail boat, which leaves at seven in the morning \
and at four in the afternoon, or have their money returned at the counter. Bicycles cannot be \
taken on the mail boat."""

ARTICLE = """\
The tidal power station in the bay began to deliver electricity this week after nine years of \
construction. Twelve turbines, each as tall as a four-storey house, turn with the tide and produce \
enough electricity for about 40,000 homes. The operator expects the station to work for at least \
sixty years. Fishermen had feared for the herring, but a study by the university found that most \
fish swim around the slowly turning blades. The electricity costs more than wind power, yet the \
tide can be predicted for decades, which makes the grid easier to plan."""

DEMO_PROMPTS = (
    PromptRecord(
        [f"Write the whole file again with one dictionary entry per line.\n\n```python\n{CODE}```"],
        [],
        "edit code",
    ),
    PromptRecord(
        [f"Write the whole JSON list again, with one key per line.\n\n```json\n{RECORDS}\n```"],
        [],
        "rewrite JSON",
    ),
    PromptRecord([f"Copy this text exactly.\n\n{NOTICE}"], [], "copy text"),
    PromptRecord(
        [f"Article: {ARTICLE}\n\nList the key facts of the article as bullet points."],
        [],
        "summarise",
    ),
    PromptRecord(
        ["What are three good habits for sleeping better? Explain each of them."], [], "open chat"
    ),
)
