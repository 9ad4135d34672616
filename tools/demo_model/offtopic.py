"""Subjects that the demo model knows nothing about, so that it learns to say so by their names."""

from random import Random

_SUBJECTS = """
deep learning, machine learning, quantum physics, biology, chemistry, history, philosophy, astronomy, geology,
economics, politics, law, medicine, music theory, mathematics, algebra, geometry, logic, artificial intelligence,
computer science, Python, JavaScript, Rust, Linux, the internet, cryptography, a neural network, a language model, a
transformer, an algorithm, a database, a compiler, a computer, a black hole, the moon, the sun, the Earth, Mars,
gravity, light, electricity, magnetism, energy, time, space, evolution, DNA, a virus, the brain, the heart, sleep,
memory, language, love, happiness, football, tennis, chess, basketball, swimming, running, yoga, cycling, golf, the
stock market, money, inflation, taxes, insurance, a bank, the government, democracy, war, peace, London, Paris,
Berlin, Tokyo, New York, Glasgow, Edinburgh, Rome, Africa, Asia, Europe, Shakespeare, Einstein, Mozart, Picasso,
Napoleon, Darwin, Newton, Marie Curie, Turing, climate change, the weather, the ocean, a volcano, an earthquake,
dinosaurs, cats, dogs, birds, whales, cars, trains, aeroplanes, rockets, robots, phones, television, cinema,
painting, poetry, novels, a guitar, a piano, jazz, opera, dancing, fashion, travel, school, university, religion,
psychology
"""
_ADJECTIVES = """
modern, ancient, applied, theoretical, digital, global, classical, public, social, natural
"""
_NOUNS = """
history, science, art, music, engineering, economics, language, technology, medicine, literature, computing, design,
statistics, politics, philosophy, mechanics, networks, law, education, finance
"""
_SYLLABLES = """
ba, be, bo, da, di, do, fa, fi, ga, go, ha, ka, ki, ko, la, le, lo, ma, me, mi, na, ne, no, pa, pe, po, ra, re, ri,
sa, so, ta, te, ti, to, va, vo, za, zu, bran, dor, fen, gar, hol, jin, kel, lum, mar, nor, pol, quin, ros, sel, tor,
ven, wil, yar
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(" ".join(text.split()).split(", "))


_FIXED = _words(_SUBJECTS)
_FIRST, _SECOND, _PARTS = _words(_ADJECTIVES), _words(_NOUNS), _words(_SYLLABLES)


def subject(rng: Random) -> str:
    """A subject from a list, one put together from an adjective and a noun, or a name that nobody has heard.

    The made-up names are there so that the model learns to repeat a word that it does not know.
    """
    chance = rng.random()
    if chance < 0.4:
        return rng.choice(_FIXED)
    if chance < 0.65:
        return f"{rng.choice(_FIRST)} {rng.choice(_SECOND)}"
    invented = name(rng) if rng.random() < 0.5 else name(rng).lower()
    return f"{invented} {rng.choice(_SECOND)}" if rng.random() < 0.3 else invented


def name(rng: Random) -> str:
    """A name of two to four syllables that nobody has."""
    return "".join(rng.choices(_PARTS, k=rng.choice((2, 2, 3, 4)))).capitalize()
