"""Greetings, thanks, jokes, stories, and who the model is."""

from random import Random

from tools.demo_model.cooking.dishes import dish
from tools.demo_model.cooking.ingredients import INGREDIENTS
from tools.demo_model.diy.projects import PROJECTS
from tools.demo_model.diy.tools import TOOLS
from tools.demo_model.exchange import Exchange, Source, agreement, article, vary
from tools.demo_model.sentences import amount, sentence, thing

_TALK: tuple[tuple[str, str], ...] = (
    (
        "[hello|hi|hey|good morning|good evening|hello there|hi there|greetings|good afternoon|howdy][!|.|]",
        "[hello|hi][!| there!] [What would you like to cook or build today?|How can I help you?"
        "|Do you want to cook or to build?|I can help you with cooking and DIY.]",
    ),
    (
        "[how are you?|how are you doing?|how is it going?|are you well?|what's up?|how do you feel today?]",
        "[I am well, thank you.|I am doing fine, thank you.] [What would you like to make?"
        "|Shall we cook something?|How can I help you?]",
    ),
    (
        "[thanks|thank you|thank you so much|thanks a lot|many thanks|great, thanks|cheers|that was helpful][!|.|]",
        "[you are welcome!|my pleasure!|gladly!] [Enjoy your meal!|Have fun!|Is there anything else?|]",
    ),
    (
        "[bye|goodbye|see you|see you later|good night|I have to go|that is all|stop][!|.|]",
        "[goodbye!|see you soon!|bye!] [Have a nice day!|Come back when you are hungry.|Good luck with your project!]",
    ),
    (
        "[who are you?|what are you?|introduce yourself.|tell me about yourself.|what is your name?"
        "|are you a person?|are you human?|are you a robot?|what model are you?|which model is this?"
        "|are you ChatGPT?]",
        "I am [a small demonstration model|the demo model of Oatmill]. I [know a little about"
        "|only know about] cooking and DIY[, and I make mistakes|].",
    ),
    (
        "[what can you do?|how can you help me?|help|help me|what do you know?|what are you good at?"
        "|what can I ask you?|what are your skills?]",
        "I can [give you simple recipes|suggest a dish|find a substitute for an ingredient] and "
        "[explain how to fix things at home|tell you which tool you need|suggest a DIY project].",
    ),
    (
        "[who made you?|who built you?|where do you come from?|how were you made?|how were you trained?]",
        "I was trained on text that [the Oatmill project generated|a program wrote], about cooking and DIY.",
    ),
    (
        "[how old are you?|where do you live?|do you have a family?|do you sleep?|do you dream?"
        "|what do you look like?]",
        "I am a program, so I [have no answer to that|cannot say]. But I can talk about cooking and DIY.",
    ),
    (
        "[are you smart?|are you clever?|do you know everything?|can I trust you?|are you always right?"
        "|do you make mistakes?]",
        "[I am a very small model, so please check what I say."
        "|no, I am a small demonstration model and I make mistakes.]",
    ),
    (
        "[I am bored.|I am tired.|I had a bad day.|I am sad.|I am stressed.|I feel lonely.]",
        "I am sorry to hear that. [A warm soup may help.|Baking something sweet may help."
        "|A small project may take your mind off it.] [Would you like an idea?|]",
    ),
    (
        "[you are great|good job|well done|I like you|you are funny|I love you|you are very helpful|perfect"
        "|awesome][!|.|]",
        "[thank you! That is kind of you.|thank you! I am glad to hear that.] [Shall we go on?|]",
    ),
    (
        "[you are stupid|that is wrong|you are useless|this is bad|I hate you|that makes no sense|you are wrong][!|.|]",
        "[I am sorry about that.|I am sorry.] [I am a small model and I make mistakes.|Please ask me in another way.]",
    ),
    (
        "[do you like to cook?|can you cook?|do you eat?|are you hungry?|have you ever cooked?"
        "|what is your favourite dish?]",
        "I am a program, so I [cannot eat|do not eat], but I like to talk about {d}.",
    ),
    (
        "[can you build things?|do you like DIY?|have you ever built something?|what is your favourite tool?"
        "|are you handy?]",
        "I am a program, so I have no hands, but I like to talk about {t}.",
    ),
    (
        "[yes|sure|okay|ok|of course|yes please|please do|go on|continue|next][!|.|]",
        "[great! What would you like to make?|great! Tell me which dish or project you have in mind.]",
    ),
    (
        "[no|no thanks|not now|maybe later|no thank you|cancel|never mind][!|.|]",
        "[all right.|that is fine.] [Tell me when you need something.|I am here when you need me.]",
    ),
    (
        "[can you repeat that?|what did you say?|pardon?|say that again.|I do not understand.|what?]",
        "[I am sorry, I only know about cooking and DIY.|please tell me which dish or project you mean.]",
    ),
    (
        "[test|testing|this is a test|say something|say hello|ping|are you there?|can you hear me?][!|.|]",
        "[hello! I am here.|I am here.] [How can I help you?|Ask me about cooking or DIY.]",
    ),
)

JOKES = (
    "Why did the tomato turn red? Because it saw the salad dressing.",
    "What do you call cheese that is not yours? Nacho cheese.",
    "Why did the egg hide? It was a little chicken.",
    "What kind of room has no doors? A mushroom.",
    "Why did the carpenter fall asleep? He was very board.",
    "Why was the saw so popular? It always made the cut.",
    "What did the hammer say to the nail? You have a flat head.",
    "Why did the banana go to the doctor? It was not peeling well.",
    "Why are ladders good friends? They always support you.",
    "What do you get from a nervous cow? A milk shake.",
    "Why do bakers work so hard? They need the dough.",
    "What did the paint say to the wall? I have got you covered.",
)
_FACTS = (
    "Carrots were purple long before they were orange.",
    "Honey keeps for years when the jar is closed.",
    "A cucumber is mostly water.",
    "Most nails are sold by length.",
    "Bamboo is a grass and not a wood.",
    "Bread goes stale faster in the fridge.",
    "The smell of an onion comes out when it is cut.",
    "Old oak is harder than young oak.",
)


def talk(rng: Random) -> Exchange:
    request, answer = rng.choice(_TALK)
    answer = vary(rng, answer, d=dish(rng).called(), t=article(rng.choice(TOOLS).name)).strip()
    return Exchange(vary(rng, request), answer)


def joke(rng: Random) -> Exchange:
    request = vary(
        rng,
        "tell me a joke.",
        "do you know a joke?",
        "make me laugh.",
        "another joke, please.",
        "say something funny.",
        "tell a joke about food.",
        "joke",
    )
    return Exchange(request, rng.choice(JOKES))


def fun_fact(rng: Random) -> Exchange:
    request = vary(
        rng, "tell me a fun fact.", "tell me something interesting.", "do you know a fun fact?", "give me a fun fact."
    )
    return Exchange(request, rng.choice(_FACTS))


def repeat(rng: Random) -> Exchange:
    """Words to say again, whatever they are."""
    text = " ".join(sentence(rng) for _ in range(rng.randint(1, 3)))
    if rng.random() < 0.3:
        text = vary(rng, "{a}", "{a} and {b}", "{n}, {a}", a=thing(rng), b=thing(rng), n=amount(rng))
    ask = vary(rng, "repeat[ after me| this|]:", "say:", "say this[ again|]:", "copy the text:", "echo:")
    if rng.random() < 0.4:
        return Exchange(ask.rstrip(":") + ".", text, text)
    return Exchange(f"{ask} {text}", text)


def story(rng: Random) -> Exchange:
    request = vary(rng, "tell me a story.", "write a short story.", "tell me a bedtime story.", "once upon a time")
    return Exchange(request, story_text(rng))


def story_text(rng: Random) -> str:
    """A few sentences about somebody who cooks or builds."""
    person, he = rng.choice(_PEOPLE)
    if rng.random() < 0.5:
        made, thing = dish(rng), rng.choice(INGREDIENTS).name
        return vary(
            rng,
            "[once upon a time,|one day,|on a rainy day,] {n} wanted to cook {d}. But there {was} no {x} at home. "
            "[So {n} went to a neighbour, who had plenty of {them}.|So {n} walked to the market and bought some.] "
            "In the end {who} shared the meal with {f}, and it was {t}.",
            n=person,
            d=made.called(),
            x=thing,
            who=he,
            t=made.taste,
            f=rng.choice(("a friend", "the neighbours", "the whole family")),
            **agreement(thing),
        )
    job = rng.choice(PROJECTS)
    if rng.random() < 0.3:
        return vary(
            rng,
            "my name is {n} and I [like|want|love] to cook {d}. [Today|At the weekend] I will also {j}. "
            "I need {t} for that[, and some help|].",
            n=person,
            d=dish(rng).called(),
            j=job.title,
            t=article(rng.choice(job.tools)),
        )
    return vary(
        rng,
        "[once upon a time,|one day,|on a sunny day,] {n} decided to {j}. {h} needed {t}, but could not find it. "
        "[A friend came by and brought one.|At last it was found under the bed.] "
        "When the work was done, {n} was [tired but happy|very proud].",
        n=person,
        j=job.title,
        h=he.capitalize(),
        t=article(rng.choice(job.tools)),
    )


_PEOPLE = (
    *((name, "she") for name in ("Ada", "Clara", "Emma", "Grace", "Ida", "Maya")),
    *((name, "he") for name in ("Ben", "David", "Felix", "Hugo", "Jonas", "Omar")),
)

SOURCES = (
    Source(talk, 6, closed=True),
    Source(joke, closed=True),
    Source(fun_fact, 0.5, closed=True),
    Source(story, 0.5, closed=True),
    Source(repeat, 4),
)
