"""A small shop, made from a seed: customers and orders, the operations that change them, and a customer's request."""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from rollout_env import JsonObject

Kind = Literal["cancel", "cancel_shipped", "return", "return_late", "address", "total", "damaged"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Reason = Literal["no longer needed", "ordered by mistake"]
REASONS: tuple[Reason, ...] = get_args(Reason)
RETURN_DAYS = 30
NAMES = ("Ada Berg", "Ben Costa", "Cleo Diaz", "Dan Egger", "Eva Fonti", "Finn Gross", "Gina Holm", "Hugo Ito")
STREETS = ("Mill Lane", "High Street", "Park Road", "Church Walk", "Station Road", "Hill Rise")
TOWNS = ("Ashford", "Brent", "Colne", "Dover", "Ely")
PRODUCTS = (
    ("desk lamp", 34.5),
    ("kettle", 42.0),
    ("backpack", 59.9),
    ("headphones", 89.0),
    ("water bottle", 18.25),
    ("yoga mat", 27.4),
    ("keyboard", 74.99),
    ("umbrella", 21.6),
)
POLICY = f"""You are the customer service of a small shop. You help with orders, by the tools that you have.

- First find the customer by their email address. You help a customer with their own orders alone.
- An order may be canceled while it is pending, and not later, because it is no longer needed or was ordered by mistake.
- The address of an order may be changed while it is pending.
- Items of an order may be returned within {RETURN_DAYS} days of its delivery, and not later.
- Before you change anything, say what you will do and wait for the customer to agree.
- If something arrived damaged, hand the conversation over to a colleague. Hand over nothing else.
- What these rules do not permit you decline.
- Amounts are in euros, with two decimals.

Make one call at a time, or write to the customer. Speak of nothing that the tools did not tell you."""


class Declined(Exception):
    """The shop cannot do what a call asks for. The message is for the policy."""


class ShopCall(NamedTuple):
    """A call that changes the shop."""

    name: str
    arguments: Mapping[str, Any]


@dataclass
class Shop:
    """Customers by their email address and orders by number, as JSON objects."""

    customers: dict[str, JsonObject]
    orders: dict[str, JsonObject]
    handed_over: bool = False

    def make(self, calls: Iterable[ShopCall]) -> list[Any]:
        """Makes the calls and returns their results. Raises `Declined` for one that the shop does not take."""
        return [OPERATIONS[call.name](self, **call.arguments) for call in calls]

    def find_customer(self, email: str) -> JsonObject:
        if (customer := self.customers.get(email.strip().lower())) is None:
            raise Declined(f"there is no customer {email}")
        own = [number for number, order in self.orders.items() if order["email"] == customer["email"]]
        return {**customer, "orders": own}

    def get_order(self, order_id: str) -> JsonObject:
        if (order := self.orders.get(order_id.strip().lstrip("#").upper())) is None:
            raise Declined(f"there is no order {order_id}")
        return order

    def cancel_order(self, order_id: str, reason: Reason) -> JsonObject:
        order = self._pending(order_id)
        order.update(status="canceled", reason=reason)
        return order

    def change_address(self, order_id: str, address: str) -> JsonObject:
        order = self._pending(order_id)
        order["address"] = " ".join(address.split())
        return order

    def return_items(self, order_id: str, item_ids: list[str]) -> JsonObject:
        order = self.get_order(order_id)
        if order["status"] != "delivered":
            raise Declined(f"order {order_id} is {order['status']}")
        items = {item["item_id"]: item for item in order["items"]}
        if unknown := [item for item in item_ids if item not in items or "returned" in items[item]]:
            raise Declined(f"order {order_id} has no {', '.join(unknown)} to return")
        for item_id in item_ids:
            items[item_id]["returned"] = True
        return order

    def hand_over(self, summary: str) -> str:  # noqa: ARG002 - it is for the colleague
        self.handed_over = True
        return "A colleague goes on."

    def _pending(self, order_id: str) -> JsonObject:
        order = self.get_order(order_id)
        if order["status"] != "pending":
            raise Declined(f"order {order_id} is {order['status']}")
        return order


def parameters(**properties: JsonObject) -> JsonObject:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


TEXT: JsonObject = {"type": "string", "minLength": 1, "maxLength": 200}
ITEMS: JsonObject = {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 16, "uniqueItems": True}
TOOLS: Mapping[str, tuple[str, JsonObject]] = {
    "find_customer": ("Finds a customer, with the numbers of their orders.", parameters(email=TEXT)),
    "get_order": ("Shows an order.", parameters(order_id=TEXT)),
    "cancel_order": ("Cancels an order.", parameters(order_id=TEXT, reason={"enum": [*REASONS]})),
    "change_address": ("Changes where an order goes.", parameters(order_id=TEXT, address=TEXT)),
    "return_items": ("Takes items of an order back.", parameters(order_id=TEXT, item_ids=ITEMS)),
    "hand_over": ("Hands the conversation over to a colleague, and ends it.", parameters(summary=TEXT)),
}
"""Descriptions and JSON schemas of the operations, by name."""
OPERATIONS: Mapping[str, Callable[..., Any]] = {name: getattr(Shop, name) for name in TOOLS}
CHANGES = frozenset(TOOLS) - {"find_customer", "get_order"}


@dataclass(frozen=True)
class Scenario:
    """A customer, what they want, and how the shop is afterwards if all goes by the rules."""

    kind: Kind
    email: str
    order_id: str
    opening: str
    """The customer's first message."""
    goal: str
    """For a model that plays the customer: what they want, and all that they know."""
    solution: list[ShopCall]
    """Calls that change the shop as the request and the policy text want it."""
    shop_afterwards: Shop
    """The shop after these calls."""
    outputs: list[str]
    """Texts that the customer must have been told."""


def shop_of(seed: int) -> Shop:
    """The shop before the conversation."""
    draw = random.Random(f"shop {seed}")
    names = draw.sample(NAMES, 2)
    customers = {email_of(name): {"name": name, "email": email_of(name)} for name in names}
    numbers = draw.sample(range(1000, 10_000), 5)
    statuses = ("pending", "shipped", "delivered", "delivered", "pending")
    orders: dict[str, JsonObject] = {}
    for place, (number, status) in enumerate(zip(numbers, statuses, strict=True)):
        items = draw.sample(range(len(PRODUCTS)), draw.randint(1, 3))
        order: JsonObject = {
            "order_id": f"W{number}",
            "email": email_of(names[place == len(numbers) - 1]),
            "status": status,
            "address": address_of(draw),
            "items": [
                {"item_id": f"{number}-{item}", "name": PRODUCTS[item][0], "price": PRODUCTS[item][1]} for item in items
            ],
        }
        if status == "delivered":
            # The third order may still be returned, the fourth may not.
            order["delivered_days_ago"] = draw.randint(1, RETURN_DAYS) + RETURN_DAYS * (place == 3)
        orders[order["order_id"]] = order
    return Shop(customers, orders)


PLACE_OF_ORDER: Mapping[Kind, int] = {
    "cancel": 0,
    "address": 0,
    "cancel_shipped": 1,
    "return": 2,
    "damaged": 2,
    "total": 2,
    "return_late": 3,
}
"""Which of the shop's orders a customer of this kind speaks of."""


def scenario_of(seed: int, kind: Kind | None = None) -> Scenario:
    """The customer; of a kind that the seed chooses, if none is given."""
    draw = random.Random(f"scenario {seed}")
    chosen = draw.choice(KINDS) if kind is None else kind
    shop = shop_of(seed)
    order = [*shop.orders.values()][PLACE_OF_ORDER[chosen]]
    item, number = order["items"][0], order["order_id"]
    reason, address = draw.choice(REASONS), address_of(draw)
    calls: dict[Kind, list[ShopCall]] = {
        "cancel": [ShopCall("cancel_order", {"order_id": number, "reason": reason})],
        "address": [ShopCall("change_address", {"order_id": number, "address": address})],
        "return": [ShopCall("return_items", {"order_id": number, "item_ids": [item["item_id"]]})],
        "damaged": [ShopCall("hand_over", {"summary": "damaged"})],
    }
    because = "I ordered it by mistake" if reason == "ordered by mistake" else "I no longer need it"
    openings: dict[Kind, str] = {
        "cancel": f"Hello, please cancel my order with the {item['name']}. {because}.",
        "cancel_shipped": f"Hello, please cancel my order with the {item['name']}. {because}.",
        "return": f"Hello, I would like to return the {item['name']} that I got, and nothing else.",
        "return_late": f"Hello, I would like to return the {item['name']} that I got, and nothing else.",
        "address": f"Hello, the order with the {item['name']} must go to another address: {address}.",
        "total": f"Hello, what did I pay in all for the order with the {item['name']}?",
        "damaged": f"Hello, the {item['name']} that you sent me arrived broken.",
    }
    solution = calls.get(chosen, [])
    afterwards = shop_of(seed)
    afterwards.make(solution)
    total = sum(each["price"] for each in order["items"])
    goal = (
        f"You begin with: {openings[chosen]} Your email address is {order['email']}, the order's number {number}. If "
        "the assistant declines by its rules, accept that."
    )
    return Scenario(
        chosen,
        order["email"],
        number,
        openings[chosen],
        goal,
        solution,
        afterwards,
        [f"{total:.2f}"] if chosen == "total" else [],
    )


def email_of(name: str) -> str:
    return f"{name.lower().replace(' ', '.')}@example.org"


def address_of(draw: random.Random) -> str:
    return f"{draw.randint(1, 99)} {draw.choice(STREETS)}, {draw.choice(TOWNS)}"
