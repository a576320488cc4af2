"""Prompts for `headrace train-heads`: questions and tasks of many kinds, beginnings of functions and of prose.

    .venv/bin/python bench/training_prompts.py /tmp/prompts.jsonl.gz [--prose FOLDER_OR_FILE ...]

Chat prompts are made of the forms and topics below; code begins as functions of Python's standard library do, which are
on every machine; prose is taken from the text files that are named (.txt, .rst), a paragraph's beginning each. None of
it is of the benchmarks (MT-bench, HumanEval) that heads are measured on.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

TOPICS = """the water cycle|photosynthesis|black holes|the French Revolution|the Silk Road|machine learning|inflation
supply and demand|the immune system|plate tectonics|volcanoes|the periodic table|chemical bonds
electric motors|gravity
climate change|renewable energy|nuclear power|solar panels|wind turbines|electric cars
public transport|bicycles|trains
the Roman Republic|ancient Egypt|the Renaissance|the Industrial Revolution|the Cold War|the Ottoman Empire|the Vikings
jazz|classical music|the piano|the guitar|opera|film noir|documentaries|impressionism|sculpture
photography|architecture
poetry|novels|short stories|fairy tales|mythology|philosophy|ethics|logic|probability|statistics|geometry|algebra
prime numbers|fractions|compound interest|mortgages|budgeting|saving money|investing|insurance
taxes|starting a business
marketing|customer service|negotiation|leadership|teamwork|time management|remote work|job interviews|public speaking
learning a language|Spanish|Japanese|Latin|etymology|grammar|essay writing|note taking|studying for exams|memory
sleep|nutrition|vitamins|exercise|running|yoga|swimming|hiking|camping|gardening|houseplants|composting|beekeeping
cooking pasta|baking bread|sourdough|soups|salads|vegetarian meals|breakfast|coffee|tea|chocolate|cheese|spices
dogs|cats|birds|whales|dolphins|sharks|elephants|bees|ants|butterflies|dinosaurs|rainforests
deserts|oceans|coral reefs
rivers|mountains|glaciers|earthquakes|hurricanes|weather forecasts|the Moon|Mars|Jupiter|comets
telescopes|space travel
satellites|rockets|airplanes|ships|bridges|skyscrapers|concrete|steel|glass|paper|printing|clocks|maps|compasses|GPS
the Internet|search engines|databases|operating systems|compilers|encryption|passwords
computer viruses|firewalls|backups
version control|unit tests|recursion|sorting algorithms|binary search|hash tables|linked lists
graphs|regular expressions
web servers|REST APIs|SQL queries|Python decorators|object-oriented programming
functional programming|concurrency|caching
robots|3D printing|virtual reality|video games|chess|card games|board games|puzzles|riddles
magic tricks|juggling|kites
football|basketball|tennis|cricket|the Olympic Games|marathons|martial arts|skiing|surfing|sailing
fishing|horse riding
Paris|Tokyo|New York|Cairo|Rio de Janeiro|Iceland|New Zealand|India|Kenya|Peru|Norway|Greece|Thailand|Canada|Mexico
friendship|family traditions|weddings|birthdays|moving to a new city|travelling alone|volunteering|kindness|patience
stress|anxiety|motivation|habits|procrastination|creativity|happiness|curiosity|courage|honesty|gratitude|loneliness
a haunted house|a lost key|a talking tree|a lighthouse keeper|a time traveller|a lonely robot|a dragon|a pirate ship
a detective|a small village|a snowstorm|a secret garden|a letter from the past|a new neighbour|an old bookshop"""
FORMS = """Explain {} to a ten-year-old.|What is interesting about {}?|Write a short paragraph about {}.
Give me five facts about {}.|Write a poem about {}.|Tell me a story about {}.|What should a beginner know about {}?
List the advantages and disadvantages of {}.|How has {} changed over the last hundred years?
Write a blog post about {}.
Can you summarize the most important ideas of {}?|What are common misconceptions about {}?|Why does {} matter?
Compose an email to a friend in which you recommend reading about {}.|Describe {} in two sentences.
Act as a teacher and give a short lesson on {}.|Pretend you are a journalist and report on {}.
Write a dialogue about {}.
Create a quiz of five questions about {}, with answers.|Make a table that compares two kinds of {}.|Define {}.
What would happen if there were no {}?|Suggest three projects about {} for a school class.|How does {} work?
Write a speech about {} that takes two minutes.|Give step by step advice on {}.
I have a question about {}. Can you help?
Write a limerick about {}.|What are the best books about {}?|Argue for and against {}.|Outline an essay about {}.
Translate "I would like to know more about {}" into French and German.|Write a product description related to {}.
Invent a character who loves {} and describe a day of theirs.|What do experts disagree on about {}?
Give a definition, an example and a counterexample of {}.|Write a news headline and a first paragraph about {}."""
CODING = """Write a Python function that {}.|Write a JavaScript function that {}.|How do I write a program that {}?
Write a C++ program that {}.|Write a function in Python with a docstring and tests that {}.|Explain code that {}.
Show me a simple SQL or Python solution for a task: code that {}.|Write a shell script that {}."""
TASKS = """counts the words of a text file|finds the longest line of a file|reverses the words of a sentence
checks whether a year is a leap year|converts Celsius to Fahrenheit|computes the average of a list
merges two dictionaries
removes duplicates and keeps the order|groups names by their first letter|prints a multiplication table
validates an email address|generates a random password|reads a CSV file and sums a column|downloads a web page
sorts students by grade|finds the second largest number|computes the area of a polygon|simulates rolling two dice
parses a date|counts vowels|encodes text with a Caesar cipher
finds all files larger than a megabyte|draws a triangle of stars
implements a stack|implements a queue with two stacks|finds the shortest path in a grid|computes a running total
flattens a nested list|rotates a matrix|checks balanced quotes|formats a number with thousands separators
keeps the ten most recent items|retries a request three times|measures how long a function takes
splits a list in chunks"""
MATH = """A shop sells {a} {things} for {b} dollars. How much do {c} of them cost?
Anna has {a} {things} and gives away {b}. Then she buys {c} more. How many does she have?
A train travels {a} kilometres in {b} hours. How far does it go in {c} hours?|What is {a} times {b} plus {c}?
Solve for x: {b}x + {c} = {a}.|What is {b} percent of {a}?
If {a} {things} are shared by {b} children, how many are left?
A rectangle is {b} metres wide and {c} metres long. What are its area and perimeter?"""
THINGS = ("apples", "pencils", "tickets", "books", "stamps", "marbles", "cups", "chairs", "oranges", "cards")
EXTRACTION = """Extract all numbers from this text as a JSON list: "{}"|Summarize this text in one sentence: "{}"
Rewrite this text so that a child understands it: "{}"|Correct the grammar of this text: "{}"
List the nouns in this text: "{}"|Is the tone of this text positive or negative? "{}"|Give this text a title: "{}"
Answer with a question that this text answers: "{}"|Translate this text into Spanish: "{}"
Continue this text: "{}\""""


def _split(text: str) -> list[str]:
    return [part.strip() for line in text.splitlines() for part in line.split("|") if part.strip()]


def chat_prompts(random_: random.Random, count: int, paragraphs: list[str]) -> Iterator[str]:
    topics, forms, coding, tasks = _split(TOPICS), _split(FORMS), _split(CODING), _split(TASKS)
    math, extraction = _split(MATH), _split(EXTRACTION)
    kinds = ["topic"] * 12 + ["code"] * 3 + ["math"] * 3 + (["text"] * 3 if paragraphs else [])
    for _ in range(count):
        kind = random_.choice(kinds)
        if kind == "topic":
            yield random_.choice(forms).format(random_.choice(topics))
        elif kind == "code":
            yield random_.choice(coding).format(random_.choice(tasks))
        elif kind == "math":
            a, b, c = random_.randint(20, 400), random_.randint(2, 20), random_.randint(2, 30)
            yield random_.choice(math).format(a=a, b=b, c=c, things=random_.choice(THINGS))
        else:
            yield random_.choice(extraction).format(random_.choice(paragraphs)[:500])


def code_prompts(random_: random.Random, count: int) -> Iterator[str]:
    """Functions of the standard library up to the end of their docstring, some without one up to their first line."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    found = []
    for path in files:
        source = path.read_text(encoding="utf-8", errors="ignore")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
                continue
            documented = ast.get_docstring(node) is not None
            last = node.body[0].end_lineno if documented else node.body[0].lineno
            part = lines[node.lineno - 1 : last]
            indent = len(part[0]) - len(part[0].lstrip())
            text = "\n".join(line[indent:] for line in part)
            if 40 < len(text) < 900:
                found.append(text + "\n")
    random_.shuffle(found)
    yield from found[:count]


def paragraphs_of(sources: list[str]) -> list[str]:
    """Paragraphs of plain prose."""
    found = []
    for source in map(Path, sources):
        files = sorted(source.rglob("*")) if source.is_dir() else [source]
        for path in files:
            if path.suffix not in (".txt", ".rst"):
                continue
            for paragraph in path.read_text(encoding="utf-8", errors="ignore").split("\n\n"):
                text = " ".join(paragraph.split())
                if 120 < len(text) < 1500 and text[0].isupper() and text.count(":") < 4:
                    found.append(text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", help="a .jsonl.gz file")
    parser.add_argument("--prose", nargs="*", default=[], help="text files, or folders of them")
    parser.add_argument("--chat", type=int, default=9000)
    parser.add_argument("--code", type=int, default=2000)
    parser.add_argument("--raw-prose", type=int, default=1500)
    arguments = parser.parse_args()
    random_ = random.Random(0)
    paragraphs = paragraphs_of(arguments.prose)
    random_.shuffle(paragraphs)
    rows = [{"prompt": text} for text in dict.fromkeys(chat_prompts(random_, arguments.chat, paragraphs))]
    rows += [{"prompt": text, "raw": True} for text in code_prompts(random_, arguments.code)]
    for text in paragraphs[: arguments.raw_prose]:
        words = text.split()
        rows.append({"prompt": " ".join(words[: random_.randint(8, min(40, len(words)))]), "raw": True})
    random_.shuffle(rows)
    with gzip.open(arguments.output, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"{len(rows)} prompts, {sum('raw' in row for row in rows)} of them beginnings of texts")


if __name__ == "__main__":
    main()
