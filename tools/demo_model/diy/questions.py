"""Questions about tools and projects, and their answers."""

from random import Random

from tools.demo_model.cooking.questions import duration
from tools.demo_model.diy.projects import PROJECTS, Project
from tools.demo_model.diy.tools import BY_NAME, TOOLS
from tools.demo_model.exchange import Exchange, Source, article, capital, listing, numbered, vary


def how_to(rng: Random) -> Exchange:
    job = rng.choice(PROJECTS)
    request = vary(
        rng,
        "how do I {j}?",
        "how can I {j}?",
        "I want to {j}.",
        "can you help me {j}?",
        "tell me how to {j}.",
        "show me how to {j}.",
        "what is the best way to {j}?",
        "I need to {j}. Where do I start?",
        "help me {j}.",
        "what are the steps to {j}?",
        j=job.title,
    )
    return Exchange(request, instructions(rng, job))


def instructions(rng: Random, job: Project) -> str:
    """A project in words: numbered, or as one paragraph."""
    if rng.random() < 0.6:
        return vary(rng, "[here is how to {j}:|to {j}:|this is how you {j}:]\n{s}", j=job.title, s=numbered(job.steps))
    return vary(rng, "{s}[ {c}|]", s=" ".join(job.steps), c=job.caution)


def tools_needed(rng: Random) -> Exchange:
    job = rng.choice(PROJECTS)
    request = vary(
        rng,
        "which tools do I need to {j}?",
        "what do I need to {j}?",
        "what tools should I get to {j}?",
        "list the tools to {j}.",
        "I want to {j}. Which tools do I need?",
        j=job.title,
    )
    names = [article(name) for name in job.tools]
    answer = vary(
        rng,
        "[to {j}, you need {t}.|you need {t}.][ You also need {m}.|]",
        j=job.title,
        t=listing(names),
        m=listing(job.materials),
    )
    return Exchange(request, answer)


def materials(rng: Random) -> Exchange:
    job = rng.choice(PROJECTS)
    request = vary(
        rng,
        "which materials do I need to {j}?",
        "what do I have to buy to {j}?",
        "what materials does it take to {j}?",
        j=job.title,
    )
    return Exchange(request, vary(rng, "you need {m}.", "to {j}, you need {m}.", m=listing(job.materials), j=job.title))


def job_time(rng: Random) -> Exchange:
    job = rng.choice(PROJECTS)
    request = vary(
        rng, "how long does it take to {j}?", "how much time do I need to {j}?", "can I {j} in an hour?", j=job.title
    )
    if request.startswith("Can"):
        template = "[yes, you can {j} in about {t}.]" if job.minutes <= 60 else "[no, it takes about {t} to {j}.]"
    else:
        template = "[it takes about {t} to {j}.|you need about {t} to {j}.]"
    return Exchange(request, vary(rng, template, j=job.title, t=duration(job.minutes)))


def difficulty(rng: Random) -> Exchange:
    job = rng.choice(PROJECTS)
    request = vary(
        rng,
        "is it hard to {j}?",
        "how difficult is it to {j}?",
        "is it easy to {j}?",
        "can a beginner {j}?",
        j=job.title,
    )
    verdict = {
        "easy": "[it is easy to {j}.|a beginner can {j}.]",
        "medium": "[it takes some care to {j}.|it is not too hard to {j}, but take your time.]",
        "hard": "[it is hard to {j}.|it is not easy to {j}, so ask somebody with experience for help.]",
    }[job.level]
    return Exchange(
        request, vary(rng, verdict + " [It takes about {t}.|]", j=job.title, t=duration(job.minutes)).strip()
    )


def safety(rng: Random) -> Exchange:
    job = rng.choice(PROJECTS)
    request = vary(
        rng,
        "is it safe to {j}?",
        "what should I be careful about when I {j}?",
        "is there anything dangerous when I {j}?",
        "give me a safety tip to {j}.",
        "what can go wrong when I {j}?",
        j=job.title,
    )
    answer = vary(
        rng,
        "[yes, if you are careful. {c}|it is safe with some care. {c}]" if request.startswith("Is it") else "{c}",
        c=job.caution,
    )
    return Exchange(request, answer)


def tool_use(rng: Random) -> Exchange:
    tool = rng.choice(TOOLS)
    request = vary(
        rng,
        "what is {t} for?",
        "what do I use {t} for?",
        "what is {t}?",
        "what does {t} do?",
        "when do I need {t}?",
        "tell me about {t}.",
        "describe {t}.",
        "explain what {t} is.",
        t=article(tool.name),
    )
    answer = vary(
        rng,
        "{t} is [a tool for|used for] {u}.[ When you use it, {c}.| {c2}.|]",
        t=article(tool.name),
        u=tool.use,
        c=tool.caution,
        c2=capital(tool.caution),
    )
    return Exchange(request, answer)


def tool_swap(rng: Random) -> Exchange:
    tool = rng.choice(TOOLS)
    request = vary(
        rng,
        "what can I use instead of {t}?",
        "I do not have {t}.",
        "I don't have {t}. What can I use?",
        "is there a substitute for {t}?",
        "can I do this without {t}?",
        t=article(tool.name),
    )
    return Exchange(
        request,
        vary(
            rng,
            "you can use {s} instead of {t}.",
            "{s} will do the same job.",
            "try {s} instead.",
            s=article(tool.swap),
            t=article(tool.name),
        ),
    )


def tool_for(rng: Random) -> Exchange:
    tool = rng.choice(TOOLS)
    request = vary(
        rng, "what tool is good for {u}?", "which tool do I need for {u}?", "what do I use for {u}?", u=tool.use
    )
    return Exchange(request, vary(rng, "[use|you need|the right tool is] {t}.", t=article(tool.name)))


def job_idea(rng: Random) -> Exchange:
    job = rng.choice(PROJECTS)
    level = {"easy": "an easy", "medium": "a medium", "hard": "a hard"}[job.level]
    request = vary(
        rng,
        "suggest a project for {p}.",
        "what can I do in {p} this weekend?",
        "give me {l} DIY project.",
        "suggest {l} project.",
        "I am bored. What can I build?",
        "I need a project for {p}.",
        p=job.place,
        l=level,
    )
    return Exchange(
        request,
        vary(
            rng,
            "[you could {j}.|how about this: {j}.|I suggest that you {j}.] It takes about {t}.",
            j=job.title,
            t=duration(job.minutes),
        ),
    )


def about(rng: Random, job: Project) -> str:
    """Two sentences that describe a project."""
    level = {"easy": "an easy", "medium": "a medium", "hard": "a hard"}[job.level]
    return vary(
        rng,
        "[with this project you can {j}. It is {l} job for {p}.|{l} job for {p}: {j}.] "
        "[It takes about {t}.|You need {w}.]",
        j=job.title,
        l=level,
        p=job.place,
        t=duration(job.minutes),
        w=listing([article(name) for name in job.tools]),
    )


def article_text(rng: Random) -> str:
    """A project as a page of a book would print it, or a note about a tool."""
    if rng.random() < 0.4:
        tool = rng.choice(TOOLS)
        return vary(
            rng,
            "{t} is used for {u}. When you use it, {c}. If you have none, use {s}.",
            t=article(tool.name),
            u=tool.use,
            c=tool.caution,
            s=article(tool.swap),
        )
    job = rng.choice(PROJECTS)
    return vary(
        rng,
        "how to {j}\n\n{a}\n\n[Tools|You need]:\n{l}\n\nSteps:\n{s}\n\n{c}",
        j=job.title,
        a=about(rng, job),
        l="\n".join(f"- {name}" for name in (*job.tools, *job.materials)),
        s=numbered(job.steps),
        c=job.caution,
    )


_MISSING = {name for job in PROJECTS for name in job.tools} - BY_NAME.keys()
if _MISSING:
    raise ValueError(f"projects use tools that are not described: {sorted(_MISSING)}")

SOURCES = (
    Source(how_to, 4),
    Source(tools_needed, 2),
    Source(materials),
    Source(job_time, 1.5),
    Source(difficulty),
    Source(safety, 1.5),
    Source(tool_use, 2),
    Source(tool_swap, 1.5),
    Source(tool_for),
    Source(job_idea, 1.5),
)
