"""Which of an assistant's functions an utterance asks for, by whatever names the caller gives them."""

import json
from random import Random

from tools.demo_model.cooking.dishes import dish
from tools.demo_model.diy.projects import PROJECTS
from tools.demo_model.exchange import Exchange, Source, listing, vary
from tools.demo_model.workflows.task import form, sometimes, task

_INTENTS = (
    (
        ("next", "next_step", "continue", "step_next", "forward"),
        "[next|go on|what is next?|next step, please|I am done|what do I do now?|okay, done|move on]",
    ),
    (
        ("previous", "previous_step", "back", "step_back", "go_back"),
        "[go back|previous step|what was the last step?|back, please|the step before]",
    ),
    (
        ("repeat", "repeat_step", "say_again"),
        "[repeat that|say that again|what did you say?|once more, please|pardon?]",
    ),
    (("start", "begin", "start_task"), "[let's start|start|begin|I am ready|start cooking|yes, let us begin]"),
    (("stop", "cancel", "quit", "end"), "[stop|quit|exit|cancel|goodbye|that is enough]"),
    (
        ("ingredients", "requirements", "show_requirements", "list_ingredients"),
        "[what do I need?|which ingredients do I need?|list the ingredients|what tools do I need?]",
    ),
    (
        ("search", "find", "search_task", "new_search"),
        "[I want to make {d}|search for {d}|find me {d}|something with {x}|do you have {d}?|how about {d}?]",
    ),
    (
        ("replace", "replacement", "substitute", "replace_ingredient"),
        "[what can I use instead of {x}?|I have no {x}|replace the {x}|I don't like {x}|can I leave out the {x}?]",
    ),
    (
        ("question", "answer_question", "ask", "question_answering", "qa"),
        "[how long does it take?|how hot should it be?|why do I do that?|how do I do that?|is it done?"
        "|how much {x} do I need?|can I freeze it?]",
    ),
    (
        ("chit_chat", "small_talk", "chat", "talk"),
        "[hello|how are you?|tell me a joke|thank you|you are funny|my day was long|I love {d}]",
    ),
    (
        ("select", "choose", "select_option"),
        "[the first one|the second one|option three|I take the last one|number two]",
    ),
)


def decision(rng: Random) -> Exchange:
    """The name of the function alone, as a call, or as JSON, as the request wants it."""
    intents = rng.sample(_INTENTS, rng.randint(3, len(_INTENTS)))
    names = [rng.choice(names) for names, _ in intents]
    chosen = rng.randrange(len(intents))
    made, work = dish(rng), task(rng)
    said = vary(rng, intents[chosen][1], d=made.called(), x=made.mains[0].name)
    listed = vary(rng, "{c}", "\n- {b}", c=rng.choice((", ".join(names), listing(names, "or"))), b="\n- ".join(names))
    listed = listed[:1].lower() + listed[1:]
    ask = vary(
        rng,
        "[choose|name|decide] the intent of the user.",
        "[classify|decide] what the user wants.",
        "which [intent|function|action] does the user [have in mind|want|need]?",
        "choose the [function|action] that fits the user's [words|message|request].",
        "what should the assistant do next?",
    )
    form_of_answer = rng.random()
    if form_of_answer < 0.5:
        tail = vary(rng, "answer with one of[ these|]: {o}", "the intents are: {o}", "options: {o}", o=listed)
        answer = names[chosen]
    elif form_of_answer < 0.7:
        tail = vary(rng, "answer with a call such as {f}(). The functions are: {o}", f=names[0], o=listed)
        answer = f"{names[chosen]}()"
    else:
        tail = vary(rng, "answer in JSON with the key intent. The intents are: {o}", o=listed)
        answer = json.dumps({"intent": names[chosen]})
    end = "" if "\n" in listed else "."
    context = form(
        rng,
        ("title", sometimes(rng, work.title)),
        ("step", sometimes(rng, rng.choice(work.steps), 0.3)),
        ("assistant", sometimes(rng, rng.choice(work.steps), 0.3)),
        ("user", said),
    )
    return Exchange(f"{ask} {tail}{end}".replace(": \n", ":\n"), answer, context)


_DECIDE = (
    "Decide what the user wants, who is in the middle of a task. Answer in JSON with the keys intent and ai_response. "
    "The intents are: recommend_new_search, if the user wants to do something else; continue_current_task, if what the "
    "user says belongs to the task; ask_clarifying_question, if it could be either. In ai_response, write the one "
    "sentence that the assistant says next."
)
_SAID = {
    "recommend_new_search": (
        "[I want to make {d} instead|let us make {d}|find me a recipe for {d}|I would rather {j}|search for {d}"
        "|show me how to {j}|something else, please|I do not want this any more|can we do another task?]",
        "[shall I search for {s}?|would you like to look for {s}?|let us look for {s}.]",
    ),
    "continue_current_task": (
        "[what is next?|next step|how long does this take?|repeat that, please|I am done with this step|go on"
        "|can I use {y} instead?|what do I need?|how much do I need?|is it ready?|what comes after this?]",
        "[let us go on with the task.|we go on with this step.|here is what comes next.]",
    ),
    "ask_clarifying_question": (
        "[{x}|something with {x}|how about {x}?|what about {x}?|I like {x}|I have {x}|do you know {d}?|hmm, {d}]",
        "[do you want to use {z} here, or search for something new?|is that about this task, or a search for {z}?]",
    ),
}


def search_decision(rng: Random) -> Exchange:
    """Whether the user wants another task, this one, or it cannot be told; with what the assistant says next."""
    intent = rng.choice(list(_SAID))
    said, answer = _SAID[intent]
    made, work, other = dish(rng), task(rng), rng.choice(PROJECTS)
    name = made.mains[0].name
    utterance = vary(rng, said, d=made.called(), j=other.title, x=name, y=made.mains[1].name)
    searched = next(
        (phrase for phrase in (made.called(), f"how to {other.title}") if phrase.removeprefix("how to ") in utterance),
        "something else",
    )
    reply = vary(rng, answer, s=searched, z=made.called() if made.called() in utterance else name)
    context = form(
        rng,
        ("domain", sometimes(rng, work.domain, 0.6)),
        ("title", work.title),
        ("description", sometimes(rng, f"{work.title} in {len(work.steps)} steps.", 0.2)),
        ("assistant", sometimes(rng, rng.choice(work.steps), 0.3)),
        ("user", sometimes(rng, vary(rng, "next.", "go on.", "okay.", "start."), 0.3)),
        ("assistant", sometimes(rng, rng.choice(work.steps), 0.6)),
        ("user", utterance if utterance.endswith("?") or rng.random() < 0.5 else f"{utterance}."),
    )
    return Exchange(_DECIDE, json.dumps({"intent": intent, "ai_response": reply}), context)


SOURCES = (Source(decision, 2.5), Source(search_decision, 2))
