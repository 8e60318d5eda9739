"""Several threads on one model: contexts and libraries take turns, and every thread gets its own right answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny_folder import write_tiny_folder

from longspan.context import Context, Library, ask
from longspan.models import load

TEXT = "The deposit is due on the first of March. The hall holds two hundred people. " * 3
QUESTIONS = ["Who pays?", "When is it due?", "How many fit?", "Which hall?"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(write_tiny_folder(tmp_path_factory.mktemp("tiny"), positions=1024), dtype="float32")


def together(work, inputs):
    with ThreadPoolExecutor(len(inputs)) as pool:
        return list(pool.map(work, inputs))


def test_one_context_is_asked_by_many(loaded):
    context = Context.read(loaded, TEXT, "knorm(budget=0.5)")
    alone = [context.ask(q, max_new_tokens=4).ids for q in QUESTIONS]
    assert together(lambda q: context.ask(q, max_new_tokens=4).ids, QUESTIONS * 2) == alone * 2


def test_each_thread_reads_for_itself(loaded):
    recipes = ["full", "knorm(budget=0.5)", "tova(budget=0.4)", "prophetkv(r=0.3)"]
    from longspan.context import open_context

    def work(recipe):
        return open_context(loaded, TEXT, recipe).ask("Who pays?", max_new_tokens=4).ids

    assert together(work, recipes) == [work(r) for r in recipes]


def test_a_library_is_shared(loaded, tmp_path):
    documents = ["The deposit is due on the first of March.", "The hall holds two hundred people."]
    alone = [ask(Library(loaded), q, documents, "prophetkv(r=0.3)", max_new_tokens=4).ids for q in QUESTIONS]
    library = Library(loaded, tmp_path)
    together(lambda q: ask(library, q, documents, "naive-reuse", max_new_tokens=4).ids, QUESTIONS)
    assert library.counts.documents == 3 and library.counts.misses == 3
    found = together(lambda q: ask(library, q, documents, "prophetkv(r=0.3)", max_new_tokens=4).ids, QUESTIONS)
    warm = [ask(library, q, documents, "prophetkv(r=0.3)", max_new_tokens=4).ids for q in QUESTIONS]
    assert found == warm and len(alone) == len(warm)
