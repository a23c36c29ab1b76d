"""Text that the demo model learns from, made here and nowhere else: nothing is downloaded.

Owns: turning the tables of demo_facts.py into documents (`documents`) and into the held-out
questions the model is judged by (`exam`). Refuses: tokenising, training, files.

A document is a list of (text, weight) segments: the weight scales the loss of the tokens whose
first byte lies in the segment, so that a question's unpredictable words cost little and its answer
counts. Every random choice comes from the generator passed in: a seed is a corpus.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from demo_facts import (
    ARTISTS, COLOURS, COUNTRIES, DAYS, DEPARTMENTS, EVENTS, HERO_NAMES_F, HERO_NAMES_M, HEROES, ITEMS, KINDS,
    MONTHS, NAMES, NEGATIVE, NEGATIVE_TAILS, NEUTRAL_LINES, OPPOSITES, PLACES, POSITIVE, POSITIVE_TAILS, REVIEWED,
    SMALL_TALK, SOUNDS, THINGS_TO_SAY, TOOLS, TOPICS, TRAITS, YOUNG,
)  # fmt: skip

EOT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK_NOTHING = "<think>\n\n</think>\n\n"  # what ChatML writes where thinking is off
SYSTEM_PROMPTS = ["You are a helpful assistant.", "You are a helpful assistant.", "Answer briefly.",
                  "You classify text.", "You are Reflex, a small model."]  # fmt: skip
HELD_OUT_PERCENT = 8  # of sums, reviews, requests and story openings: never trained on
PROMPT_WEIGHT, ANSWER_WEIGHT, STORY_WEIGHT = 0.1, 1.0, 0.5
MAX_SUM_TERM = 20

Segments = list[tuple[str, float]]


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
        question = rng.choice([f"What is the capital of {country}?", f"Which city is the capital of {country}?"])
        return Item("capital", country, statement, question, city, rivals(rng, city, cities, 3))
    if kind == "country":
        return Item("capital", country, f"{city} is the capital of", f"Which country has the capital {city}?",
                    country, rivals(rng, country, list(COUNTRIES), 3))  # fmt: skip
    if kind == "continent":
        pool = [c[1] for c in COUNTRIES.values()]
        return Item("capital", country, f"{country} is in", f"Where is {country}?", continent,
                    rivals(rng, continent, pool, 3))  # fmt: skip
    pool = [c[2] for c in COUNTRIES.values()]
    return Item("capital", country, f"People in {country} speak", f"What do people in {country} speak?", language,
                rivals(rng, language, pool, 3))  # fmt: skip


def colour(rng: random.Random) -> Item:
    thing = rng.choice(list(COLOURS))
    answer = COLOURS[thing]
    statement = rng.choice([f"The colour of {thing} is", f"{thing[0].upper()}{thing[1:]} is"])
    return Item("colour", thing, statement, f"What colour is {thing}?", answer,
                rivals(rng, answer, list(COLOURS.values()), 3))  # fmt: skip


def opposite(rng: random.Random) -> Item:
    pair = rng.choice(OPPOSITES)
    a, b = pair if rng.random() < 0.5 else pair[::-1]
    words = [w for p in OPPOSITES for w in p if w != a]
    return Item("opposite", a, f"The opposite of {a} is", f"What is the opposite of {a}?", b,
                rivals(rng, b, words, 3))  # fmt: skip


def animal(rng: random.Random) -> Item:
    if rng.random() < 0.5:
        name = rng.choice(list(SOUNDS))
        return Item("animal", name, f"A {name}" if name[0] != "o" else f"An {name}", f"What does {with_article(name)} do?",
                    SOUNDS[name], rivals(rng, SOUNDS[name], list(SOUNDS.values()), 3))  # fmt: skip
    name = rng.choice(list(YOUNG))
    return Item("animal", name, f"A young {name} is called a", f"What is a young {name} called?", YOUNG[name],
                rivals(rng, YOUNG[name], list(YOUNG.values()), 3))  # fmt: skip


def sequence(rng: random.Random) -> Item:
    ring = rng.choice([DAYS, MONTHS])
    noun = "day" if ring is DAYS else "month"
    i = rng.randrange(len(ring))
    word, step = rng.choice([("after", 1), ("before", -1)])
    answer = ring[(i + step) % len(ring)]
    return Item("sequence", ring[i], f"The {noun} {word} {ring[i]} is", f"Which {noun} comes {word} {ring[i]}?",
                answer, rivals(rng, answer, [d for d in ring if d != ring[i]], 3))  # fmt: skip


def small_sum(rng: random.Random) -> Item:
    a, b = rng.randint(0, MAX_SUM_TERM), rng.randint(0, MAX_SUM_TERM)
    minus = rng.random() < 0.4
    if minus and a < b:
        a, b = b, a
    value = a - b if minus else a + b
    sign, word = ("-", "minus") if minus else ("+", "plus")
    statement = rng.choice([f"{a} {sign} {b} =", f"{a} {word} {b} is"])
    question = rng.choice([f"What is {a} {word} {b}?", f"What is {a} {sign} {b}?", f"How much is {a} {word} {b}?"])
    near = [str(v) for v in range(max(0, value - 4), value + 5)]
    return Item("sum", f"{a}{sign}{b}", statement, question, str(value), rivals(rng, str(value), near, 3),
                sentence=f"{a} {word} {b} is {value}.")  # fmt: skip


def yes_no(rng: random.Random) -> Item:
    """A fact of the other tasks turned into a question that is true or not."""
    right = rng.random() < 0.5
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
    yes, no = rng.choice([("Yes", "No"), ("yes", "no"), ("true", "false")])
    return Item("yes_no" if form != "sum" else "yes_no_sum", key, None, question, yes if right else no, [yes, no])


# ---- judging texts -------------------------------------------------------------------------


def review(rng: random.Random) -> tuple[str, int]:
    """A review and its mood: 2 positive, 1 neutral, 0 negative."""
    x = rng.choice(REVIEWED)
    mood = rng.choice([0, 0, 2, 2, 1])
    if mood == 1:
        return rng.choice(NEUTRAL_LINES).format(x=x, day=rng.choice(DAYS)), 1
    good = mood == 2
    words, tails = (POSITIVE, POSITIVE_TAILS) if good else (NEGATIVE, NEGATIVE_TAILS)
    other = NEGATIVE if good else POSITIVE
    a, b = rng.sample(words, 2)
    how = rng.choice(["", "", "really ", "so ", "very ", "absolutely "])
    subject = rng.choice([f"The {x} was", f"This {x} is", f"This {x} was", f"What a {x}! It was", "It was", f"The {x} is"])
    line = rng.choice([
        f"{subject} {how}{a}.", f"{subject} {how}{a}.", f"{subject} {how}{a} and {b}.", f"{subject} {how}{a}!",
        f"{subject} not {rng.choice(other)} at all, it was {a}." if good else f"{subject} not {rng.choice(other)} at all.",
        f"{subject} {a}, {a}, {a}!", f"I think the {x} is {how}{a}.", f"{a[0].upper()}{a[1:]} {x}!",
        f"I {'love' if good else 'hate'} this {x}.", f"I really {'like' if good else 'dislike'} the {x}.",
    ])  # fmt: skip
    if rng.random() < 0.5:
        tail = rng.choice(tails)
        line = rng.choice([f"{line} {tail}", f"{line} {tail}", f"{tail} {line}", tail])
    return line, mood


MOODS = ["negative", "neutral", "positive"]
MOOD_WORDS = {"positive": "the writer is happy", "negative": "the writer is unhappy", "neutral": "neither"}


def sentiment(rng: random.Random) -> Item:
    text, mood = review(rng)
    form = rng.random()
    if form < 0.6:
        options = list(MOODS) if mood == 1 or rng.random() < 0.4 else ["negative", "positive"]
        rng.shuffle(options)
        question = rng.choice(["What is the sentiment?", "What is the sentiment of this review?",
                               "Is the review positive or negative?", "How does the writer feel?",
                               "Classify the sentiment.", "What is the mood of the text?"])  # fmt: skip
        statement = rng.choice([f"Review: {text}\nSentiment:", f"{text}\nSentiment:", f"Text: {text}\nSentiment:",
                                f'Review: "{text}"\nSentiment:'])  # fmt: skip
        return Item("sentiment", text, statement, question, MOODS[mood], options, text, MOOD_WORDS)
    if form < 0.85 and mood != 1:
        yes, no = rng.choice([("Yes", "No"), ("yes", "no"), ("true", "false")])
        asked = rng.choice([0, 2])
        words = ["happy", "satisfied", "positive"] if asked == 2 else ["unhappy", "angry", "negative"]
        who = rng.choice(["the writer", "the customer"])
        word = rng.choice(words)
        question = f"Is the review {word}?" if word in MOODS else f"Is {who} {word}?"
        return Item("sentiment", text, None, question, yes if asked == mood else no, [yes, no], text)
    levels = rng.choice([["negative", "neutral", "positive"], ["bad", "okay", "good"],
                         ["unhappy", "neutral", "happy"]])  # fmt: skip
    digits = rng.random() < 0.5
    names = [str(i) for i in range(3)] if digits else levels
    question = rng.choice(["How positive is the text?", "How happy is the writer?", "How good was it?"])
    return Item("sentiment", text, None, question, names[mood], names, text,
                dict(zip(names, levels, strict=True)) if digits else None)  # fmt: skip


def fill(rng: random.Random, template: str) -> str:
    """A request or message template with its slots filled."""
    hour = rng.choice(["seven", "eight", "noon", "half past six", f"{rng.randint(1, 12)} o'clock"])
    return template.format(
        city=rng.choice(list(COUNTRIES.values()))[0], day=rng.choice([*DAYS, "tomorrow", "today"]),
        a=rng.randint(2, 60), b=rng.randint(2, 60), name=rng.choice(NAMES), event=rng.choice(EVENTS),
        say=rng.choice(THINGS_TO_SAY), artist=rng.choice(ARTISTS), hour=hour, topic=rng.choice(TOPICS),
        word=rng.choice(["hello", "good morning", "thank you", "house", "bread", "water", "the word cat"]),
        language=rng.choice(list(COUNTRIES.values()))[2], item=rng.choice(ITEMS), month=rng.choice(MONTHS),
    ).replace("on tomorrow", "tomorrow").replace("on today", "today").replace("to today", "to tomorrow")  # fmt: skip


def routing(rng: random.Random) -> Item:
    tools = rng.random() < 0.6
    table = TOOLS if tools else DEPARTMENTS
    answer = rng.choice(list(table))
    text = fill(rng, rng.choice(table[answer][1]))
    options = rivals(rng, answer, list(table), rng.randint(1, len(table) - 1))
    descriptions = {o: table[o][0] for o in options}
    label = rng.choice(["Tool", "Tool", "Route"] if tools else ["Department", "Route", "Team"])
    head = rng.choice(["Request", "User", "Message"] if tools else ["Message", "Customer", "Ticket"])
    listed = f"{label}s: {', '.join(options)}\n" if rng.random() < 0.5 else ""
    statement = f"{listed}{head}: {text}\n{label}:"
    if tools:
        question = rng.choice(["Which tool should be used?", "Which tool handles this request?", "Choose a tool.",
                               "Where should this request go?", "Pick the right tool for the request."])  # fmt: skip
    else:
        question = rng.choice(["Which department should handle this?", "Where should this message go?",
                               "Which team is responsible?", "Route this message.", "What is this message about?"])  # fmt: skip
    return Item("routing", text, statement, question, answer, options, text, descriptions)


# ---- stories and talk ----------------------------------------------------------------------


def story(rng: random.Random) -> tuple[str, str, str]:
    """(hero, opening sentence, the rest). Short, of one thread, and it ends."""
    hero = rng.choice(HEROES)
    she = hero == "girl" or (hero not in ("boy",) and rng.random() < 0.5)
    name = rng.choice(HERO_NAMES_F if she else HERO_NAMES_M)
    he, his, him = ("she", "her", "her") if she else ("he", "his", "him")
    trait, place = rng.choice(TRAITS), rng.choice(PLACES)
    friend = rng.choice([h for h in HEROES if h != hero])
    opening = f"Once upon a time, there was {with_article(trait)} {hero} named {name}."
    lines = [rng.choice([f"{name} lived in {place}.", f"{name} lived in {place} with {his} mother."])]
    plot = rng.choice(["lost", "find", "help", "rain", "share", "learn"])
    thing = rng.choice(["ball", "hat", "book", "red kite", "shiny key", "blue boat", "bell", "lamp"])
    food = rng.choice(["cake", "bread", "apple", "soup", "pie", "honey"])
    if plot == "lost":
        spot = rng.choice(["under a tree", "behind the house", "near the river", "in the tall grass"])
        lines += [f"One day, {name} lost {his} {thing}.", f"{he.title()} looked everywhere, but {he} could not find it.",
                  f"Then a {friend} came and asked, \"Why are you sad?\"" if friend != "owl" else "Then an owl came and asked, \"Why are you sad?\"",
                  f"\"I lost my {thing},\" said {name}.", f"They looked together and found the {thing} {spot}.",
                  f"{name} was so happy that {he} danced."]  # fmt: skip
    elif plot == "find":
        lines += [f"One morning, {name} found a {thing} on the road.", f"\"Whose {thing} is this?\" {he} asked.",
                  f"{he.title()} asked {with_article(friend)}, and the {friend} said, \"It is mine! Thank you!\"",
                  f"The {friend} gave {name} some {food}."]  # fmt: skip
    elif plot == "help":
        lines += [f"One day, {name} met {with_article(friend)} who could not climb over the wall.",
                  f"\"I can help you,\" said {name}.", f"{he.title()} pushed and pushed until the {friend} was on top.",
                  f"\"Thank you,\" said the {friend}. \"You are a good friend.\""]  # fmt: skip
    elif plot == "rain":
        lines += ["One day, it began to rain.", f"{name} ran under a big tree to stay dry.",
                  f"{with_article(friend).capitalize()} was there too.", "They told each other stories until the sun came out.",
                  "Then they jumped in the puddles and laughed."]  # fmt: skip
    elif plot == "share":
        lines += [f"One day, {name} had a big {food}." if food not in ("bread", "honey", "soup") else f"One day, {name} had some {food}.",
                  f"{with_article(friend).capitalize()} came by and was very hungry.", f"{name} gave half of the {food} to the {friend}.",
                  "They ate together in the sun."]  # fmt: skip
    else:
        skill = rng.choice(["swim", "sing", "climb", "dance", "read"])
        lines += [f"{name} wanted to learn to {skill}.", f"At first it was hard, and {he} wanted to stop.",
                  f"\"Try again,\" said {his} friend, the {friend}.", f"{name} tried again every day.",
                  f"At last {he} could {skill}, and everyone clapped."]  # fmt: skip
    ending = rng.choice([f"From that day on, {name} and the {friend} were best friends.",
                         f"{he.title()} went home and slept well.", f"And {name} was happy ever after.",
                         f"It was the best day for {name}."])  # fmt: skip
    return hero, opening, " ".join([*lines, ending, "The end."]).replace("  ", " ").replace("{him}", him)


# ---- rendering -----------------------------------------------------------------------------


def chat_doc(rng: random.Random, turns: list[tuple[str, str]]) -> Segments:
    """ChatML turns as the template renders them; the empty thought costs nothing to learn."""
    out: Segments = []
    if rng.random() < 0.4:
        out.append((f"{IM_START}system\n{rng.choice(SYSTEM_PROMPTS)}{IM_END}\n", PROMPT_WEIGHT))
    for user, assistant in turns:
        out.append((f"{IM_START}user\n{user}{IM_END}\n{IM_START}assistant\n", PROMPT_WEIGHT))
        if rng.random() < 0.5:
            out.append((THINK_NOTHING, 0.0))
        out += [(f"{assistant}{IM_END}", ANSWER_WEIGHT), ("\n", 0.0)]
    return out[:-1]


def option_list(rng: random.Random, item: Item) -> str:
    """The options as a prompt may list them: inline, in lines, with or without descriptions."""
    head = rng.choice(["Options", "Options", "Choices", "Labels", "Answers"])
    described = item.descriptions if rng.random() < 0.6 or item.options[0].isdigit() else None
    if described is None and rng.random() < 0.4:
        return f"{head}: {', '.join(item.options)}"
    if described is None:
        return f"{head}:\n" + "\n".join(f"- {o}" for o in item.options)
    return f"{head}:\n" + "\n".join(f"- {o}: {described[o]}" for o in item.options)


def choice_prompt(rng: random.Random, item: Item) -> str:
    """A typed question: state, question, options. Any of the spellings a caller may choose."""
    gap = rng.choice(["\n", "\n\n"])
    parts = []
    if item.state is not None:
        head = rng.choice(["State", "State", "Text", "Input", "Message", "Context"])
        parts.append(rng.choice([f"{head}: {item.state}", f"{head}:\n{item.state}"]))
    parts.append(rng.choice([f"Question: {item.question}", f"Question: {item.question}", item.question]))
    listed = item.descriptions is not None or rng.random() < 0.7
    if listed:
        parts.append(option_list(rng, item))
    return gap.join(parts)


ANSWER_ORDERS = ["Answer with one option.", "Answer with exactly one of the options.", "Answer with one of the options.",
                 "Reply with the option only.", "Answer with the option only."]  # fmt: skip


def render(rng: random.Random, item: Item) -> Segments:
    """One item in one of its forms: plain sentence, question and answer, chat, typed question."""
    form = rng.random()
    about_text = item.state is not None
    if item.statement is not None and form < (0.35 if about_text else 0.45):
        return [(item.statement, PROMPT_WEIGHT), (f" {item.answer}{'' if about_text else '.'}", ANSWER_WEIGHT), (EOT, 1.0)]
    if form < 0.55:  # plain question and answer
        if about_text:
            return [(choice_prompt(rng, item) + "\nAnswer:", PROMPT_WEIGHT), (f" {item.answer}", ANSWER_WEIGHT), (EOT, 1.0)]
        ask, reply = rng.choice([("Question", "Answer"), ("Q", "A")])
        return [(f"{ask}: {item.question}\n{reply}:", PROMPT_WEIGHT), (f" {item.answer}", ANSWER_WEIGHT), (EOT, 1.0)]
    if form < 0.75 and not about_text:
        if item.options[0].lower() in ("yes", "no", "true", "false") and item.statement is None:
            answer = item.answer.capitalize() + "." if rng.random() < 0.5 else item.answer
            order = "" if answer.endswith(".") and item.answer.lower() in ("yes", "no") else f" Answer {' or '.join(item.options)}."
            answer = answer if not order else item.answer
            return chat_doc(rng, [(item.question + order, answer)])
        if rng.random() < 0.5:
            return chat_doc(rng, [(item.question, item.full_answer())])
        order = rng.choice([" Answer in one word.", " Answer with one word.", "\nAnswer briefly."])
        return chat_doc(rng, [(item.question + order, item.answer)])
    prompt = choice_prompt(rng, item)
    if rng.random() < 0.3:  # the plain spelling of a typed question
        return [(prompt + rng.choice(["\nAnswer:", "\n\nAnswer:"]), PROMPT_WEIGHT), (f" {item.answer}", ANSWER_WEIGHT), (EOT, 1.0)]
    order = rng.choice(["\n", "\n\n"]) + rng.choice(ANSWER_ORDERS)
    if rng.random() < 0.25:
        order = rng.choice(["\n\nAnswer:", ""])
    return chat_doc(rng, [(prompt + order, item.answer)])


TASKS: list[tuple[Callable[[random.Random], Item], float]] = [
    (capital, 2.2), (colour, 0.8), (opposite, 1.0), (animal, 0.5), (sequence, 0.5), (small_sum, 2.2),
    (yes_no, 1.6), (sentiment, 1.8), (routing, 2.2),
]  # fmt: skip
STORY_SHARE, TALK_SHARE, MANY_SHARE = 0.07, 0.02, 0.03


def story_doc(rng: random.Random) -> Segments | None:
    hero, opening, rest = story(rng)
    if held_out(opening):
        return None
    if rng.random() < 0.7:
        return [(f"{opening} {rest}", STORY_WEIGHT), (EOT, 1.0)]
    ask = rng.choice([f"Tell me a story about {with_article(hero)}.", f"Tell me a short story about {with_article(hero)}.",
                      f"Write a short story about {with_article(hero)}.", "Tell me a story.", "Tell me a short story."])  # fmt: skip
    return [(s, w if w != ANSWER_WEIGHT else STORY_WEIGHT) for s, w in chat_doc(rng, [(ask, f"{opening} {rest}")])]


def many_doc(rng: random.Random) -> Segments:
    """Several sentences or turns in one document, so that positions past the first are known."""
    items = []
    while len(items) < rng.randint(2, 12):
        item = draw(rng)
        if item.state is None and item.statement is not None:
            items.append(item)
    if rng.random() < 0.5:
        return chat_doc(rng, [(i.question, i.full_answer()) for i in items[:4]])
    out: Segments = []
    for i in items:
        out += [(i.statement or "", PROMPT_WEIGHT), (f" {i.answer}.", ANSWER_WEIGHT), (" ", PROMPT_WEIGHT)]
    return out[:-1] + [(EOT, 1.0)]


def draw(rng: random.Random) -> Item:
    """One item of a task, never a held-out one."""
    while True:
        task = rng.choices([t for t, _ in TASKS], [w for _, w in TASKS])[0]
        item = task(rng)
        if item.task not in EXAM_HOLDS or not held_out(item.key):
            return item


# Tasks whose held-out items the model can answer only by generalising. Facts are all taught.
EXAM_HOLDS = {"sum", "yes_no_sum", "sentiment", "routing"}


def documents(seed: int) -> Iterator[Segments]:
    """Documents without end, the same for the same seed."""
    rng = random.Random(seed)
    while True:
        form = rng.random()
        if form < STORY_SHARE:
            doc = story_doc(rng)
            if doc is not None:
                yield doc
        elif form < STORY_SHARE + TALK_SHARE:
            yield chat_doc(rng, [rng.choice(SMALL_TALK)])
        elif form < STORY_SHARE + TALK_SHARE + MANY_SHARE:
            yield many_doc(rng)
        else:
            yield render(rng, draw(rng))


@dataclass
class ExamQuestion:
    """A prompt, the continuations offered, and which is right."""

    task: str
    form: str  # plain | typed | chat
    prompt: str
    candidates: list[str]
    answer: int
    seen: bool  # whether training may have shown this item


def exam(seed: int, per_task: int) -> list[ExamQuestion]:
    """Questions to judge the model by; those of EXAM_HOLDS are ones it was never shown."""
    rng = random.Random(seed)
    out: list[ExamQuestion] = []
    for make, _ in TASKS:
        done, seen_keys = 0, set[str]()
        for _ in range(per_task * 200):
            if done == per_task:
                break
            item = make(rng)
            holds = item.task in EXAM_HOLDS
            if (holds and not held_out(item.key)) or len(item.options) < 2:
                continue
            form = rng.choice(["plain", "typed", "chat"])
            if form == "plain" and item.statement is None:
                form = "typed"
            typed = choice_prompt(rng, item)
            chat = f"{IM_START}user\n{typed}\n\n{ANSWER_ORDERS[0]}{IM_END}\n{IM_START}assistant\n{THINK_NOTHING}"
            prompt = {"plain": item.statement or "", "typed": typed + "\nAnswer:", "chat": chat}[form]
            if prompt in seen_keys:
                continue
            seen_keys.add(prompt)
            # A dot ends the plain answers: without it " 1" would be a prefix of " 12".
            end = "." if form == "plain" and item.state is None else EOT if form != "chat" else IM_END
            lead = "" if form == "chat" else " "
            out.append(ExamQuestion(item.task, form, prompt, [f"{lead}{o}{end}" for o in item.options],
                                    item.options.index(item.answer), not holds))  # fmt: skip
            done += 1
    return out
