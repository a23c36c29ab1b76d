"""Items: what the demo model is asked, task by task, with the right answer and its rivals.

Owns: drawing an Item of each task from the tables of demo_facts.py, and telling which items are held out.
Refuses: how an item is spelt in a document (demo_corpus.py).
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

from demo_facts import (
    ARTISTS,
    COLOURS,
    COUNTRIES,
    DAYS,
    DEPARTMENT_QUESTIONS,
    DEPARTMENTS,
    EVENTS,
    FOODS,
    HERO_NAMES_F,
    HERO_NAMES_M,
    HEROES,
    HOURS,
    ITEMS,
    KINDS,
    LEVELS,
    MONTHS,
    NAMES,
    NEGATIVE,
    NEGATIVE_TAILS,
    NEUTRAL_LINES,
    OPPOSITES,
    PHRASES,
    PLACES,
    PLOTS,
    POSITIVE,
    POSITIVE_TAILS,
    REVIEWED,
    SENTIMENT_QUESTIONS,
    SKILLS,
    SOUNDS,
    SPOTS,
    STORY_ENDS,
    THINGS,
    THINGS_TO_SAY,
    TOOL_QUESTIONS,
    TOOLS,
    TOPICS,
    TRAITS,
    YOUNG,
)

HELD_OUT_PERCENT = 8  # of sums, reviews, requests and story openings: never trained on
MAX_SUM_TERM = 20
YES_NO = [("Yes", "No"), ("yes", "no"), ("true", "false")]


def held_out(key: str) -> bool:
    """Whether an item belongs to the exam. By its content: no seed moves it to the other side."""
    return zlib.crc32(key.encode()) % 100 < HELD_OUT_PERCENT


def with_article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


@dataclass
class Item:
    """One question of any form. `statement` + " " + answer + "." is the plain sentence."""

    task: str
    key: str  # what must be unseen for the item to be unseen
    statement: str | None  # "The capital of France is"
    question: str  # "What is the capital of France?"
    answer: str  # "Paris"
    options: list[str]  # the answer and its rivals
    state: str | None = None  # what the question is about, where it is about a text
    descriptions: dict[str, str] | None = None
    sentence: str | None = None  # a full answer, where statement + answer is none
    held: bool = False  # kept for the exam: training never sees it

    def full_answer(self) -> str:
        if self.sentence is not None:
            return self.sentence
        if self.statement is None or "\n" in self.statement:
            return self.answer
        return f"{self.statement} {self.answer}."


def rivals(rng: random.Random, answer: str, pool: list[str], n: int) -> list[str]:
    """The answer and up to n others of the pool, in random order."""
    others = sorted({p for p in pool if p != answer})
    out = [answer, *rng.sample(others, min(n, len(others)))]
    rng.shuffle(out)
    return out


# ---- facts ---------------------------------------------------------------------------------


def capital(rng: random.Random) -> Item:
    country = rng.choice(list(COUNTRIES))
    city, continent, language = COUNTRIES[country]
    kind = rng.choice(["capital", "capital", "capital", "country", "continent", "language"])
    cities = [c[0] for c in COUNTRIES.values()]
    if kind == "capital":
        statement = f"The capital of {country} is"
        question = rng.choice(
            [f"What is the capital of {country}?", f"Which city is the capital of {country}?"]
        )
        return Item("capital", country, statement, question, city, rivals(rng, city, cities, 3))
    if kind == "country":
        return Item(
            "capital",
            country,
            f"{city} is the capital of",
            f"Which country has the capital {city}?",
            country,
            rivals(rng, country, list(COUNTRIES), 3),
        )
    if kind == "continent":
        pool = [c[1] for c in COUNTRIES.values()]
        return Item(
            "capital",
            country,
            f"{country} is in",
            f"Where is {country}?",
            continent,
            rivals(rng, continent, pool, 3),
        )
    pool = [c[2] for c in COUNTRIES.values()]
    return Item(
        "capital",
        country,
        f"People in {country} speak",
        f"What do people in {country} speak?",
        language,
        rivals(rng, language, pool, 3),
    )


def colour(rng: random.Random) -> Item:
    thing = rng.choice(list(COLOURS))
    answer = COLOURS[thing]
    statement = rng.choice([f"The colour of {thing} is", f"{thing[0].upper()}{thing[1:]} is"])
    return Item(
        "colour",
        thing,
        statement,
        f"What colour is {thing}?",
        answer,
        rivals(rng, answer, list(COLOURS.values()), 3),
    )


def opposite(rng: random.Random) -> Item:
    pair = rng.choice(OPPOSITES)
    a, b = pair if rng.random() < 0.5 else pair[::-1]
    words = [w for p in OPPOSITES for w in p if w != a]
    return Item(
        "opposite", a, f"The opposite of {a} is", f"What is the opposite of {a}?", b, rivals(rng, b, words, 3)
    )


def animal(rng: random.Random) -> Item:
    if rng.random() < 0.5:
        name = rng.choice(list(SOUNDS))
        return Item(
            "animal",
            name,
            f"A {name}" if name[0] != "o" else f"An {name}",
            f"What does {with_article(name)} do?",
            SOUNDS[name],
            rivals(rng, SOUNDS[name], list(SOUNDS.values()), 3),
        )
    name = rng.choice(list(YOUNG))
    return Item(
        "animal",
        name,
        f"A young {name} is called a",
        f"What is a young {name} called?",
        YOUNG[name],
        rivals(rng, YOUNG[name], list(YOUNG.values()), 3),
    )


def sequence(rng: random.Random) -> Item:
    ring = rng.choice([DAYS, MONTHS])
    noun = "day" if ring is DAYS else "month"
    i = rng.randrange(len(ring))
    word, step = rng.choice([("after", 1), ("before", -1)])
    answer = ring[(i + step) % len(ring)]
    return Item(
        "sequence",
        ring[i],
        f"The {noun} {word} {ring[i]} is",
        f"Which {noun} comes {word} {ring[i]}?",
        answer,
        rivals(rng, answer, [d for d in ring if d != ring[i]], 3),
    )


def small_sum(rng: random.Random) -> Item:
    a, b = rng.randint(0, MAX_SUM_TERM), rng.randint(0, MAX_SUM_TERM)
    minus = rng.random() < 0.4
    if minus and a < b:
        a, b = b, a
    value = a - b if minus else a + b
    sign, word = ("-", "minus") if minus else ("+", "plus")
    statement = rng.choice([f"{a} {sign} {b} =", f"{a} {word} {b} is"])
    question = rng.choice(
        [f"What is {a} {word} {b}?", f"What is {a} {sign} {b}?", f"How much is {a} {word} {b}?"]
    )
    near = [str(v) for v in range(max(0, value - 4), value + 5)]
    return Item(
        "sum",
        f"{a}{sign}{b}",
        statement,
        question,
        str(value),
        rivals(rng, str(value), near, 3),
        sentence=f"{a} {word} {b} is {value}.",
        held=held_out(f"{a}{sign}{b}"),
    )


def yes_no(rng: random.Random) -> Item:
    """A fact of the other tasks turned into a question that is true or not."""
    right, fact_held = rng.random() < 0.5, False
    form = rng.choice(["capital", "colour", "kind", "opposite", "sum"])
    if form == "capital":
        fact = capital(rng)
        while not (fact.statement or "").startswith("The capital"):
            fact = capital(rng)
        city = fact.answer if right else rng.choice([o for o in fact.options if o != fact.answer])
        question, key = f"Is {city} the capital of {fact.key}?", f"{city}/{fact.key}"
    elif form == "colour":
        fact = colour(rng)
        shade = fact.answer if right else rng.choice([o for o in fact.options if o != fact.answer])
        question, key = f"Is {fact.key} {shade}?", f"{fact.key}/{shade}"
    elif form == "kind":
        kind = rng.choice(list(KINDS))
        other = kind if right else rng.choice([k for k in KINDS if k != kind])
        noun = rng.choice([n for n in KINDS[kind] if n not in ("orange", "milk")])
        question, key = f"Is {with_article(noun)} {other}?", f"{noun}/{other}"
    elif form == "opposite":
        fact = opposite(rng)
        word = fact.answer if right else rng.choice([o for o in fact.options if o != fact.answer])
        question, key = f"Is {word} the opposite of {fact.key}?", f"{word}/{fact.key}"
    else:
        fact = small_sum(rng)
        value = fact.answer if right else rng.choice([o for o in fact.options if o != fact.answer])
        question, key = f"Is {fact.key.replace('+', ' + ').replace('-', ' - ')} = {value}?", fact.key
        fact_held = fact.held
    yes, no = rng.choice(YES_NO)
    answer = yes if right else no
    task = "yes_no_sum" if form == "sum" else "yes_no"
    return Item(task, key, None, question, answer, [yes, no], held=fact_held)


# ---- judging texts -------------------------------------------------------------------------


def typed_loosely(rng: random.Random, text: str) -> str:
    """Now and then as people type: no capitals, no full stop."""
    if rng.random() < 0.1:
        text = text[0].lower() + text[1:]
    return text.rstrip(".!?") if rng.random() < 0.1 else text


def review(rng: random.Random) -> tuple[str, int]:
    """A review and its mood: 2 positive, 1 neutral, 0 negative."""
    x = rng.choice(REVIEWED)
    mood = rng.choice([0, 0, 2, 2, 1])
    if mood == 1:
        return rng.choice(NEUTRAL_LINES).format(x=x, day=rng.choice(DAYS)), 1
    good = mood == 2
    words, tails = (POSITIVE, POSITIVE_TAILS) if good else (NEGATIVE, NEGATIVE_TAILS)
    contrary = rng.choice(NEGATIVE if good else POSITIVE)
    a, b = rng.sample(words, 2)
    how = rng.choice(["", "", "really ", "so ", "very ", "absolutely "])
    subject = rng.choice(
        [f"The {x} was", f"This {x} is", f"This {x} was", f"What a {x}! It was", "It was", f"The {x} is"]
    )
    line = rng.choice(
        [
            f"{subject} {how}{a}.",
            f"{subject} {how}{a}.",
            f"{subject} {how}{a} and {b}.",
            f"{subject} {how}{a}!",
            f"{subject} not {contrary} at all.",
            f"{subject} not {contrary} at all, it was {a}.",
            f"{subject} {a}, {a}, {a}!",
            f"I think the {x} is {how}{a}.",
            f"{a[0].upper()}{a[1:]} {x}!",
            f"I {'love' if good else 'hate'} this {x}.",
            f"I really {'like' if good else 'dislike'} the {x}.",
        ]
    )
    if rng.random() < 0.5:
        tail = rng.choice(tails)
        line = rng.choice([f"{line} {tail}", f"{line} {tail}", f"{tail} {line}", tail])
    return line, mood


MOODS = ["negative", "neutral", "positive"]
MOOD_WORDS = {"positive": "the writer is happy", "negative": "the writer is unhappy", "neutral": "neither"}


def sentiment(rng: random.Random) -> Item:
    text, mood = review(rng)
    # A tail alone has nothing to be composed of: held out, it would be a phrase never heard.
    held = held_out(text) and text not in POSITIVE_TAILS + NEGATIVE_TAILS
    text = typed_loosely(rng, text)
    form = rng.random()
    if form < 0.6:
        options = list(MOODS) if mood == 1 or rng.random() < 0.4 else ["negative", "positive"]
        rng.shuffle(options)
        answer, descriptions = MOODS[mood], MOOD_WORDS
        if rng.random() < 0.2:  # labels as some write them
            options, answer = [o.capitalize() for o in options], answer.capitalize()
            descriptions = {k.capitalize(): v for k, v in MOOD_WORDS.items()}
        lead = rng.choice(["Review: {}", "{}", "Text: {}", 'Review: "{}"']).format(text)
        return Item(
            "sentiment",
            text,
            f"{lead}\nSentiment:",
            rng.choice(SENTIMENT_QUESTIONS),
            answer,
            options,
            text,
            descriptions,
            held=held,
        )
    if form < 0.85 and mood != 1:
        yes, no = rng.choice(YES_NO)
        asked = rng.choice([0, 2])
        word = rng.choice(
            ["happy", "satisfied", "positive"] if asked == 2 else ["unhappy", "angry", "negative"]
        )
        who = "the review" if word in MOODS else rng.choice(["the writer", "the customer"])
        answer = yes if asked == mood else no
        return Item("sentiment", text, None, f"Is {who} {word}?", answer, [yes, no], text, held=held)
    levels = rng.choice(LEVELS)
    digits = rng.random() < 0.5
    names = [str(i) for i in range(3)] if digits else levels
    question = rng.choice(["How positive is the text?", "How happy is the writer?", "How good was it?"])
    descriptions = dict(zip(names, levels, strict=True)) if digits else None
    return Item("sentiment", text, None, question, names[mood], names, text, descriptions, held=held)


def fill(rng: random.Random, template: str) -> str:
    """A request or message template with its slots filled."""
    hour = rng.choice([*HOURS, f"{rng.randint(1, 12)} o'clock"])
    return (
        template.format(
            city=rng.choice(list(COUNTRIES.values()))[0],
            day=rng.choice([*DAYS, "tomorrow", "today"]),
            a=rng.randint(2, 60),
            b=rng.randint(2, 60),
            name=rng.choice(NAMES),
            event=rng.choice(EVENTS),
            say=rng.choice(THINGS_TO_SAY),
            artist=rng.choice(ARTISTS),
            hour=hour,
            topic=rng.choice(TOPICS),
            word=rng.choice(PHRASES),
            language=rng.choice(list(COUNTRIES.values()))[2],
            item=rng.choice(ITEMS),
            month=rng.choice(MONTHS),
        )
        .replace("on tomorrow", "tomorrow")
        .replace("on today", "today")
        .replace("to today", "to tomorrow")
    )


def routing(rng: random.Random) -> Item:
    tools = rng.random() < 0.6
    table = TOOLS if tools else DEPARTMENTS
    answer = rng.choice(list(table))
    template = rng.choice(table[answer][1])
    text = fill(rng, template)
    held = held_out(text) and template != text  # without a slot it would be a wording never heard
    text = typed_loosely(rng, text)
    if rng.random() < 0.12:  # asked about one route
        yes, no = rng.choice(YES_NO)
        about = answer if rng.random() < 0.5 else rng.choice([r for r in table if r != answer])
        question = rng.choice(["Is this about {}?", "Is the message about {}?", "Should this go to {}?"])
        answer = yes if about == answer else no
        return Item("routing", text, None, question.format(about), answer, [yes, no], text, held=held)
    options = rivals(rng, answer, list(table), rng.randint(1, len(table) - 1))
    descriptions = {o: table[o][0] for o in options}
    label = rng.choice(["Tool", "Tool", "Route"] if tools else ["Department", "Route", "Team"])
    head = rng.choice(["Request", "User", "Message"] if tools else ["Message", "Customer", "Ticket"])
    listed = f"{label}s: {', '.join(options)}\n" if rng.random() < 0.5 else ""
    statement = f"{listed}{head}: {text}\n{label}:"
    question = rng.choice(TOOL_QUESTIONS if tools else DEPARTMENT_QUESTIONS)
    return Item("routing", text, statement, question, answer, options, text, descriptions, held=held)


# ---- stories ------------------------------------------------------------------------------


def story(rng: random.Random) -> tuple[str, str, str]:
    """(hero, opening sentence, the rest). Short, of one thread, and it ends."""
    hero = rng.choice(HEROES)
    she = hero == "girl" or (hero != "boy" and rng.random() < 0.5)
    friend = rng.choice([h for h in HEROES if h != hero])
    words = {
        "name": rng.choice(HERO_NAMES_F if she else HERO_NAMES_M),
        "he": "she" if she else "he",
        "He": "She" if she else "He",
        "his": "her" if she else "his",
        "place": rng.choice(PLACES),
        "friend": friend,
        "a_friend": with_article(friend),
        "A_friend": with_article(friend).capitalize(),
        "thing": rng.choice(THINGS),
        "food": rng.choice(FOODS),
        "spot": rng.choice(SPOTS),
        "skill": rng.choice(SKILLS),
    }
    opening = f"Once upon a time, there was {with_article(rng.choice(TRAITS))} {hero} named {words['name']}."
    home = rng.choice(["{name} lived in {place}.", "{name} lived in {place} with {his} mother."])
    lines = [home, *rng.choice(PLOTS), rng.choice(STORY_ENDS), "The end."]
    return hero, opening, " ".join(lines).format(**words)
