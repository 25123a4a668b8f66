"""Vocabulary of the checks: words that betray what a text is about, or that it is not a description.

Entries are regular expressions over lower-case text, matched at word borders. `ALLOWED` is taken out of a
text first: uses of the same words that describe a place. A Python file, because only those travel to workers.
"""

from __future__ import annotations


def _listed(text: str, between: str = "") -> frozenset[str]:
    return frozenset(" ".join(part.split()) for part in (text.split(between) if between else text.split()))


_DEPICTION = (
    "statues?|paintings?|posters?|portraits?|sculptures?|murals?|pictures?|figurines?|drawings?|photos?|"
    "photographs?|reliefs?|carvings?|busts?|signs?|logos?|images?|outlines?|silhouettes?|billboards?|icons?"
)
ALLOWED = (
    # A statue of a man is a thing of the scene. Without its article, a person is none of `PERSON`.
    rf"(?:{_DEPICTION}) (?:of|showing|depicting|with) (?:(?:an?|the|one|two) )?[\w-]+",
    r"(?:security|surveillance|speed|traffic|cctv|film|movie|video|old|photo) cameras?",
    r"cameras? (?:on a tripod|hangs?|is mounted|are mounted)",
    r"(?:record|cd|dvd|music|media|cassette|tape|vinyl) players?",
    r"player pianos?",
    r"appears? (?:to be|as if|as though|old|new|empty|abandoned|worn|dark|bright)",
    r"(?:\w*light|shadows?|sun|air|water|breeze) (?:enters|falls|starts|begins)",
    r"(?:bamboo|green|young) shoots",
    r"view(?:er|ing) (?:platform|deck)s?",
)

# Who is controlled, whatever the perspective.
CONTROLLED = (
    r"(?:the|a|our) players?",
    r"players?['’]s?",
    r"player[- ](?:character|controlled)",
    r"playable",
    r"protagonists?",
    r"(?:the|main|our|central) character",
    r"an? (?:[\w-]+ )?character (?:wearing|dressed|with|in|who|that|standing|holding|walking|running)",
    r"(?:the|our) (?:hero(?:ine)?|user)",
    r"avatars?",
    # What first person shows of its own body.
    r"(?:hands?|arms?|fists?|gloves?) (?:hold|holding|holds|grip|gripping|grips|grasping|wielding)",
    r"(?:gun|weapon|pistol|shotgun|rifle|sword|chainsaw|axe|knife) (?:in|at|held in) (?:the )?"
    r"(?:(?:left|right) )?(?:hands?|foreground|bottom)",
    r"(?:held|wielded|equipped) (?:by|gun|weapon|pistol|shotgun|rifle|sword|chainsaw|axe|knife)",
)
# One person in a third-person clip is who is controlled, in all likelihood; in first person, somebody else.
PERSON = (
    r"(?:an?|the|one|this|lone|single) (?:[\w-]+ ){0,3}?(?:man|woman|boy|girl|person|figure|warrior|"
    r"knight|soldier|ninja|samurai|wizard|adventurer|explorer|hunter|marine|cowboy|archer|mage|swordsman|"
    r"traveler|thief|rogue|monk|elf|dwarf|witch|viking|pirate|assassin|mercenary|astronaut|cyclist|"
    r"agent|pilot|flyer|driver|rider|climber|skier|swimmer|dancer|fighter|robot|detective)(?!-)",
    r"he|she|his|her|him|himself|herself",
)

EVENT = (
    r"opens|closes|explodes|shatters|collapses|crumbles|disappears|vanishes|appears|attacks|kills|dies",
    r"shoots|fires at|picks up|collects|grabs|throws|jumps|leaps|defeats|spawns|respawns|dodges|fights",
    r"chases|walks|enters|approaches|becomes",
    r"slides (?:open|up|shut)|falls (?:down|dead|to the)|drops (?:down|to)",
    r"(?:starts|begins|started|began) (?:to|\w+ing)",
    r"changes (?:to|into|from|color|colour)",
    r"transitions? (?:to|into|from)",
    r"fades? (?:in|out|to|into|away)",
    r"turns (?:into|on|off|red|green|blue|black|white|dark|bright)",
    r"(?:is|are|gets?|being) (?:being )?(?:opened|picked up|killed|attacked|shot|collected|defeated)",
    r"(?:is|are|gets?|being) (?:being )?(?:eliminated|struck|hit|fired|chased)",
    # Of verbs that also tell how a place lies (runs, rises, falls), only what tells a movement; no form that
    # is a thing as well (a drive, ducks, swings).
    r"rush(?:es)?|crouch(?:es)?|rides|drives|sneaks?|flees?|escapes|emerges?|bursts|arrives?|swims|aims",
    r"dashes|sprints|wanders|hurries|charges|hides|strikes|reloads|hits|pulls|pushes|explores|travels|tumbles?",
    r"runs? (?:off|away|towards?|into|past|up to|out)|goes? out|rises? (?:from|up)|opens? fire|tips over",
    r"(?:stands|sits) up|swings (?:open|shut)",
    r"makes? (?:its|his|her|their) way|moves? by (?:itself|themselves)",
    r"attacking|shooting|fighting|chasing|exploding|picking up|fleeing|charging",
    r"suddenly|then|later|meanwhile|afterwards?|eventually|finally|gradually|over time|one by one",
    r"at first|in the beginning|once again",
    r"at the (?:start|beginning|end) of the (?:video|clip|sequence|scene)",
    r"after (?:a few|a while|a moment|that|which|some time|several)",
    r"(?:\d+(?:\.\d+)?|several|few) seconds?",
    r"throughout the (?:video|clip)|as the (?:video|clip|scene) progresses",
    r"interval i?\d+",
)

CAMERA = (
    r"cameras?",
    r"panning|pans (?:left|right|up|down|across|around|slowly|to the)",
    r"tilt(?:s|ing) (?:up|down)(?:wards?)?",
    r"zoom(?:s|ed|ing)?",
    r"dolly (?:in|out|shot|zoom)",
    r"(?:tracking|wide|medium|establishing|aerial|long|static|low-angle|high-angle|close-up) shot",
    r"(?:first|third)[- ]person",
    r"pov|point of view|viewpoint|viewers?",
    r"over[- ]the[- ]shoulder|followed from behind|hand-?held|(?:low|high)[- ]angle|(?:low|high) angle",
    r"push-in|(?:quick|jump) cuts?|filmed|shot from|(?:the|a) person filming",
    r"while (?:walking|moving|running|driving|flying|riding)",
    r"\A(?:moving|walking|running|driving|heading|flying|entering|approaching|turning)",
    r"(?:the|our) (?:view|perspective|angle) (?:is )?(?:moves|turns|shifts|rotates|changes|swings|glides)",
    r"(?:the|our) (?:view|perspective|angle) (?:is )?(?:follows|advances|sweeps|tilts|moving|turning)",
    r"we (?:see|move|walk|turn|look|follow|enter|pass|approach|are|can)",
    r"(?:the|this) (?:video|clip|footage|screenshot|recording|gameplay)",
    r"(?:the|this|these) (?:image|picture|frame)s? (?:shows?|depicts?|displays?|captures?)",
    r"(?:in|out of|into|across) (?:the )?frame(?! of)",
)

_GO = r"(?:walk|run|move|step|head|continue|proceed|sprint|strafe|advance)(?:s|ing)?"
# Movements that are actions of the one who plays, given to the model as numbers.
MOTION = (
    rf"{_GO} (?:forwards?|backwards?|ahead|straight|onwards?|left|right|sideways)",
    r"turn(?:s|ing)? (?:to the |slightly |slowly )?(?:left|right|around)",
    r"look(?:s|ing)? (?:around|up|down|to the left|to the right|left|right)",
)

# What a text about looks does not tell.
DOING = (
    r"(?:standing|walking|running|sitting|crouching|located|jumping|climbing|exploring|moving)"
    r" (?:in|on|at|near|beside|through|across|along|by|over|towards?|down|up|into|past|inside|around)",
    r"(?:in|inside|through|across|down|along) (?:an?|the) (?:[\w-]+ ){0,2}?"
    r"(?:room|hall|hallway|corridor|street|forest|cave|field|city|town|village|dungeon|desert)",
)

INTERFACE = (
    r"hud|heads-up display|user interface|ui|interface elements?",
    r"(?:health|stamina|mana|energy|boss|experience|xp|armou?r|status|hunger)"
    r" (?:bars?|meters?|counters?|points|indicators?|percentages?)",
    r"mini-?maps?|cross-?hairs?|reticles?|hotbars?|on-screen|subtitles?",
    r"ammo(?:unition)? (?:counts?|counters?|displays?|indicators?)",
    r"inventory (?:bars?|slots?|screens?)",
    r"(?:quest|objective) (?:markers?|logs?|texts?)",
    r"button prompts?",
)

REFUSAL = (
    r"(?:i|we)(?:['’]m| am| are)? (?:cannot|can['’]?t|can not|could not|couldn['’]t|won['’]t|will not)",
    r"(?:i|we)(?:['’]m| am| are)? (?:unable|not able|sorry|apologi[sz]e|must decline)",
    r"(?:i|we) (?:do(?:n['’]t| not) (?:see|have|know)|need (?:more|the|an?))",
    r"(?:cannot|can['’]t|unable to|not able to|not possible to) (?:help|assist|comply|fulfil|fulfill|provide|"
    r"describe|see|view|determine|identify|process|access|generate)",
    r"as an? (?:ai|language model|assistant)",
    r"(?:no|without) (?:images?|pictures?|video|frames?)"
    r" (?:was|were|is|are|has been|have been|provided|given|attached|available)",
    r"against (?:my|our|the) (?:policy|policies|guidelines)",
    r"(?:please|could you) (?:provide|upload|share|give)",
    r"sorry,? but",
)

# A text that is nothing but one of these says nothing.
NOTHING = _listed(
    """
    as before | character | description | empty | event | n a | na | nil | no change | no changes | no
    character | no description | no event | no event occurs | no events | no notable event | no scene |
    no significant event | no ui | none | not applicable | not available | not visible | nothing |
    nothing happened | nothing happens | null | placeholder | same as above | same as before | scene |
    see above | string | tbd | text | the same | todo | ui | undefined | unknown | unspecified
    """,
    "|",
)

_FUNCTION_WORDS = """
    the a an of and or with in on at to from by for into over under above below behind before beside
    between through across along around near toward towards against inside outside up down off out is
    are was were be been being has have had it its this that these those there their them they which who
    whose where while as not no both each some several many few two three four one other another more
    most all also but than so very only lies lie stands stand hangs hang leads lead covers covered made
    filled lined surrounded lit seen
"""
_PLACES_AND_THINGS = """
    scene area room rooms hall hallway corridor corridors wall walls floor floors ceiling door doors
    doorway window windows street road path bridge building buildings house houses city town village
    forest tree trees grass field hill hills mountain mountains river water lake sea sky cloud clouds
    sun sunlight sand desert snow rock rocks stone stones brick bricks wood wooden metal metallic
    concrete glass tile tiles tiled dirt mud cave dungeon castle tower ruins temple garden park market
    shop shops station tunnel stairs staircase steps pillar pillars column columns arch arches lamp
    lamps lantern torch torches light lights lighting dim dark bright soft warm cold harsh shadow
    shadows shadowy crate crates barrel barrels box boxes table tables chair chairs sign signs car cars
    fence gate gates pool pit platform platforms open closed narrow wide tall low high large small big
    huge long short old new worn ruined abandoned empty distant left right center middle end side sides
    back front background foreground top bottom edge corner ground surface texture textures textured
    style stylized stylised realistic pixelated low-poly cartoon retro graphics rendered gray grey green
    red blue brown black white yellow orange purple golden silver pale beige colored coloured like
    looking
"""
_WHO_AND_WHAT = """
    player character man woman soldier marine knight figure monster monsters zombie enemy enemies demon
    creature wearing wears dressed armor armour helmet boots gloves jacket shirt pants hair coat cloak
    hood sword shield gun rifle pistol shotgun weapon carries carrying opens closes appears disappears
    falls dies explodes picks picked shoots attacks enters leaves slides moves bar bars health
    ammunition ammo counter counters map icon icons text number numbers shows shown displays crosshair
    minimap message score
"""
ENGLISH = _listed(_FUNCTION_WORDS + _PLACES_AND_THINGS + _WHO_AND_WHAT)
"""Frequent words of English captions: a caption in English holds some of them."""

OTHER_LANGUAGES = {
    "French": _listed(
        "le les un une des du dans avec sur est sont et qui une aux cette ces pour par couloir mur murs porte"
    ),
    "German": _listed(
        "der das und ein eine einem einer mit auf ist sind von zu dem den im wird werden nicht auch durch tür"
    ),
    "Spanish": _listed(
        "el los las un una unos con en es son y que del al por para pared paredes puerta suelo se está"
    ),
    "Italian": _listed(
        "il lo gli un una di con su è sono e che del della dei nel nella per porta muro stanza"
    ),
    "Portuguese": _listed("os um uma com em é são e que do da dos das no na por para parede porta chão"),
    "Dutch": _listed("het een en met op zijn van deze die dat niet naar voor deur muur de"),
    "Polish": _listed("jest są w z na i do się nie oraz przez ściany drzwi pokój"),
    "Turkish": _listed("bir ve ile bu için olan duvar kapı oda var"),
    "Indonesian": _listed("yang dan di dengan ke dari ini itu adalah dinding pintu sebuah"),
    "Vietnamese": _listed("và của trong một có là với trên cánh cửa tường"),
    "Pinyin": _listed("de shi zai yi ge you he le men qiang fangjian changjing"),
}
"""Frequent words of other languages that are written in Latin letters."""
