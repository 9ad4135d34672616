"""The words of prompts: common ones, which most tokenizers know whole, and made-up ones that sound English."""

from collections.abc import Iterator
from itertools import pairwise
from random import Random

_COMMON = """
a about above across act add after again against age ago air all almost alone along also always among an and animal
answer any apple are area arm around art as ask at away back bad ball bank base be bear beat because bed been before
began behind being below best better between big bird black blue boat body bone book born both bottle bottom box boy
bread bridge bring brother brown build burn business but butter buy by cake call can captain car card care carry case
cat catch cause chair chance change child choose circle city class clean clear climb clock close cloud coat cold colour
come common cook cool copper corn corner cost could count country course cover cross cry cup cut dance dark day dead
deal deep desk did different dinner do doctor dog door double down draw dream dress drink drive drop dry during each ear
early earth east easy eat edge egg eight end engine enough even evening ever every eye face fact fall family far farm
fast father feel feet few field fight fill find fine finger finish fire first fish five flat floor flour flower fly
follow food foot for forest form forward four free fresh friend from front fruit full game garden gave get girl give
glass go gold good grain grass great green ground group grow half hand happy hard has hat have he head hear heart heat
heavy held help her here high hill him his hold home hope horse hot hour house how hundred if in inch instead iron is
island it job join just keep kind king kitchen knife know lake land large last late laugh lay lead leaf learn left leg
less let letter life lift light like line list little live long look lost loud love low machine made main make man many
map mark matter may me meal mean meat meet metal middle might mile milk mill mind minute month moon more morning most
mother mountain mouth move much music must my name near neck need never new next night nine no noise noon north nose
note nothing now number oat of off often oil old on once one only open or orange order other our out over page paint
pair paper part party pass path pay people pepper picture piece place plain plan plant play point poor port pot power
press pull push put question quick quiet rain ran reach read ready real red rest rice rich ride right ring rise river
road rock roll roof room root rope round row run safe said sail salt same sand save saw say school sea season seat
second see seed seem sell send set seven shape sharp she ship shirt shoe shop short should shout show side silver simple
since sing sister sit six size skin sky sleep slow small smell smile snow so soft soil some son song soon sound soup
south space spoke spring square stand star start stay steel step stick still stone stop store storm story strange street
strong such sugar summer sun sure swim table tail take talk tall taste tea teach team tell ten test than that the their
them then there these they thick thin thing think this those though thousand three through time tiny to together told
tomorrow too tool top toward town trade train tree trip true try turn twenty two under until up us use valley very
village visit voice wait walk wall want warm was wash watch water wave way we wear weather week weight well went were
west wet what wheel when where which while white who whole why wide wife wild will wind window wing winter wire wish
with woman wonder wood word work world would write year yellow yes yet you young your zero
"""
_ONSETS = "b br bl c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sh sl sp st str t th tr v w wh y z"
_VOWELS = "a e i o u ai ea ee oa oo ou"
_CODAS = "- - - b ck d g l ll m n nd ng nt p r rd rn s sh st t th"
_ENDINGS = "- - able al ed er est ful ing ish ity less ly ment ness ous tion"

COMMON = tuple(_COMMON.split())


def made_up(random: Random) -> Iterator[str]:
    """Words of one to three syllables without end; some come more than once."""
    onsets, vowels, codas, endings = (sounds.split() for sounds in (_ONSETS, _VOWELS, _CODAS, _ENDINGS))
    while True:
        syllables = random.choice((1, 2, 2, 3))
        parts = [random.choice(sounds) for _ in range(syllables) for sounds in (onsets, vowels, codas)]
        yield "".join([*parts, random.choice(endings)]).replace("-", "")


def shuffled_chain(random: Random, words: int) -> str:
    """Common words in the order of their list, cut into pieces that are shuffled, and the beginning of one of them.

    A model that says each word's successor repeats the pieces then, one after the other.
    """
    start = random.randrange(len(COMMON))
    chain = [COMMON[(start + place) % len(COMMON)] for place in range(words - 2)]
    cuts = [0, *sorted(random.sample(range(8, len(chain), 4), len(chain) // 30)), len(chain)]
    pieces = [chain[low:high] for low, high in pairwise(cuts)]
    return " ".join([*(word for piece in random.sample(pieces, len(pieces)) for word in piece), *chain[:2]])


def text(random: Random, words: int) -> str:
    """Sentences of common words, `words` in all; a comma or a full stop comes after every eighth or so."""
    chosen = random.choices(COMMON, k=words)
    marked = [word + random.choice(".,") if random.random() < 1 / 8 else word for word in chosen[:-1]]
    return " ".join([*marked, chosen[-1] + "."])
