// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The grammar and the words of --task grammar, as grammar.cpp reads them.
//
//   rules    LEFT.features = weight SYMBOLS | weight SYMBOLS ...
//            'word' is that word; a symbol of lower case is a class of words, one of upper case has rules of its own
//            n, m: a number, sg or pl; t: a time, now or past; one that stands on the right alone is drawn
//            ^ before a weight: the alternative nests; the deeper it is, the rarer
//   words    a topic, and its stems; forms are made of them: boat, boats; follow, follows, followed; quick, quickly
//            act: verbs with an object; do: verbs without
#include "task/grammar.hpp"

namespace trainer {

const char* const grammar_rules = R"(
TEXT.t   = 3 LINE.t | 4 LINE.t LINE.t | 2 LINE.t LINE.t LINE.t
LINE.t   = 7 CLAUSE.t '.' | 2 adverb ',' CLAUSE.t '.' | ^2 CLAUSE.t ',' LINK CLAUSE.t '.'
CLAUSE.t = 1 NP.n VP.n.t
LINK     = 4 'and' | 2 'but' | 1 'while' | 1 'because'
NP.sg    = 3 'the' NOUN.sg | 2 'a' NOUN.sg | 2 name | 1 'this' NOUN.sg | ^1 'the' NOUN.sg WHO.sg | ^1 'the' NOUN.sg IN
NP.pl    = 3 'the' NOUN.pl | 2 COUNT NOUN.pl | 1 'these' NOUN.pl | ^1 'the' NOUN.pl WHO.pl | ^1 'the' NOUN.pl IN
COUNT    = 2 'some' | 2 'many' | 1 'two' | 1 'three' | 1 'few' | 1 'all'
NOUN.n   = 5 noun.n | 3 adj noun.n | 1 adj adj noun.n
WHO.n    = 2 'who' VP.n.now | 2 'who' VP.n.past | 1 'that' NP.m act.m.past
IN       = 2 'near' NP.n | 2 'behind' NP.n | 1 'under' NP.n | 1 'with' NP.n | 1 'without' NP.n
VP.n.t   = 3 do.n.t | 2 do.n.t adverb | 4 act.n.t NP.m | 2 BE.n.t adj | ^1 act.n.t NP.m IN | ^1 SAY.n.t 'that' CLAUSE.t
BE.sg.now = 3 'is' | 1 'seems'
BE.pl.now = 3 'are' | 1 'seem'
BE.sg.past = 3 'was' | 1 'seemed'
BE.pl.past = 3 'were' | 1 'seemed'
SAY.sg.now = 1 'says' | 1 'knows' | 1 'hopes'
SAY.pl.now = 1 'say' | 1 'know' | 1 'hope'
SAY.n.past = 1 'said' | 1 'knew' | 1 'hoped'
)";

const char* const grammar_words = R"(
topic sea
noun sailor boat wave captain anchor harbour net gull whale shell island pirate storm deck mast oar tide reef crab
noun buoy compass cabin diver lighthouse raft cove
act follow board haul rescue steer drown explore repair
do drift sail founder float moor wander surface linger
adj deep salty blue stormy calm wet foggy distant coastal tidal rusty drenched windy drowned seaworthy briny
name Marina Nelson Ahab Coral Finn Morgan Delmar Pearl
topic farm
noun farmer cow field plough barn lamb goat fence tractor orchard hen meadow seed harvest stable donkey pasture duck
noun shepherd haystack scarecrow well bucket mare piglet gardener
act cultivate water milk gather fatten tether shear chase
do graze bleat ripen doze rest labour stumble sprout
adj green muddy ripe rural fertile dusty lazy healthy golden patient woolly grassy stubborn hungry rustic fenced
name Dolly Barnaby Daisy Silas Clover Hazel Wilbur Tilda
topic kitchen
noun cook pan fork oven spoon kettle onion carrot recipe plate soup lemon pepper baker cake jar stove waiter bowl
noun cookie pumpkin pastry napkin ladle dumpling butcher
act taste boil roast serve season slice burn devour
do simmer bake dine sizzle melt ferment curdle steam
adj sweet bitter hot spicy sour fresh tasty crispy greasy tender savoury creamy smoky stale juicy edible
name Julia Basil Olive Gordon Ginger Remy Nigella Saffron
topic city
noun mayor street tower bridge taxi driver bus station corner banker office shop crowd lamp elevator tunnel citizen
noun museum porter alley avenue tram suburb landlord beggar clerk
act cross pass visit demolish govern tax rebuild photograph
do hurry commute queue protest loiter gossip park migrate
adj busy noisy modern crowded famous narrow urban public wealthy crooked grey electric bustling paved glassy central
name Victor Stella Oscar Gloria Max Iris Leon Bianca
topic forest
noun hunter tree lynx owl path bear squirrel mushroom berry fern branch hollow antler fox hermit beetle stump root
noun raven woodcutter thicket glade acorn badger goblin log
act hunt track stalk surround haunt climb nibble discover
do howl prowl vanish rustle scurry wither blossom lurk
adj wild dark mossy ancient silent shady shadowy leafy twisted hidden thorny gloomy sacred damp evergreen feral
name Rowan Willow Sylvan Bruno Ashley Orson Linnea Birk
topic workshop
noun smith hammer anvil nail wrench carpenter bench chisel bolt hinge apprentice wheel chain lever engine gear plank
noun saw mechanic rivet pulley furnace toolbox spanner screw welder
act solder sharpen polish assemble measure weld fasten dismantle
do rattle rotate creak crack clatter function toil loosen
adj metallic sturdy sharp greased precise broken wooden blunt heavy mechanical solid polished loose brittle useful
adj welded
name Otto Vulcan Greta Edison Smithson Wanda Ferris Ada
topic school
noun teacher pupil book lesson pencil desk chalk exam essay playground classroom professor student library puzzle
noun dictionary question answer notebook principal riddle tutor chapter theorem ruler scholar
act explain interrupt correct memorise copy praise examine encourage
do listen graduate daydream whisper study recite fidget succeed
adj clever curious attentive strict learned academic bored diligent logical difficult simple wise studious formal
adj bright absent
name Minerva Albert Sophie Newton Matilda Edgar Hermia Ludwig
topic court
noun king queen judge lawyer crown throne witness prisoner guard palace jester trial verdict herald duke servant
noun sword jury castle banner criminal baron oath treaty ambassador page
act accuse pardon obey banish summon defend betray sentence
do kneel testify confess rule reign abdicate bow appeal
adj royal noble guilty innocent solemn loyal legal cruel proud honest ceremonial corrupt mighty just lawful
adj sovereign
name Arthur Eleanor Percy Isolde Tristan Regina Edmund Blanche
topic sky
noun pilot cloud plane rocket star comet balloon planet moon astronaut satellite kite eagle parachute wing galaxy
noun rainbow meteor telescope cockpit propeller airship orbit astronomer hangar swallow
act encircle observe launch navigate refuel circle approach detect
do soar hover descend glow explode twinkle flutter accelerate
adj luminous starry weightless high celestial airborne cosmic invisible vast swift supersonic orbital clear pale
adj radiant remote
name Amelia Orville Luna Galileo Vega Neil Sally Altair
topic music
noun singer drum violin song guitar piano flute concert melody chorus dancer trumpet conductor stage harp ballad
noun organ cello composer note rhythm orchestra bell banjo choir encore
act compose perform conduct applaud rehearse record tune admire
do croon dance improvise jingle whirl vibrate whistle yodel
adj loud melodic gentle rhythmic harmonic tuneful jazzy classical graceful tragic shrill musical slow joyful elegant
adj lyrical
name Clara Amadeus Ella Django Yoko Franz Nina Igor
topic war
noun soldier general cannon battle trench rifle bunker sergeant medal uniform enemy fortress spy bomb tank ambush
noun veteran regiment shield helmet garrison siege nurse sniper flag convoy
act attack conquer invade outflank besiege bombard protect capture
do retreat march perish salute advance starve desert parade
adj brave wounded fierce armed hostile ruthless victorious bloody weary defensive explosive fearless military
adj reckless doomed steadfast
name Hector Joan Wellington Boudica Ajax Sherman Zhukov Athena
topic market
noun merchant coin basket stall customer price bargain cart silk spice trader jewel barrel lantern carpet scale
noun smuggler wallet vendor parcel discount auction broker receipt pedlar ledger
act purchase advertise weigh import deliver export inspect order
do haggle arrive shout profit bustle speculate barter prosper
adj cheap expensive colourful rare greedy exotic precious fair shiny generous foreign fake valuable popular lucky
adj thrifty
name Ali Fatima Marco Ruth Omar Esther Pedro Zara
topic hospital
noun doctor invalid needle ward surgeon bandage medicine pill fever ambulance wound clinic disease infant crutch
noun germ pharmacist vaccine symptom stretcher healer dentist tablet syringe orderly cure
act treat heal vaccinate diagnose inject quarantine comfort infect
do cough faint recover sneeze ache tremble suffer breathe
adj sick swollen pallid painful sterile contagious feverish weak careful medical urgent chronic dizzy numb clinical
adj fragile
name Florence Galen Marie Pasteur Clement Salome Hugo Vera
topic desert
noun camel dune oasis cactus scorpion lizard nomad mirage tent caravan vulture canyon boulder pyramid viper
noun sandstorm guide fossil cave jackal tomb mummy horizon ruin turban prophet
act traverse irrigate excavate worship bury endure trail plunder
do thirst wilt scorch camp collapse slither pray crawl
adj dry sandy barren scorching endless arid thirsty sunny rocky empty timeless burning venomous nomadic desolate
adj warm
name Tariq Cleo Ramses Yasmin Idris Samira Khalid Nefer
topic winter
noun skier snowman glacier sledge icicle mitten penguin igloo avalanche blanket chimney fireplace scarf husky walrus
noun mountain blizzard trapper skate seal chalet caribou shovel snowflake toboggan candle
act bulldoze insulate thicken shelter bundle salt cover fetch
do shiver glide hibernate hesitate stiffen tumble thaw huddle
adj cold snowy icy white frozen bleak slippery arctic cosy frigid barefoot frosty glacial polar brisk wintry
name Nils Freya Olaf Ingrid Sven Astrid Kristoff Elsa
topic house
noun mother father table chair window door mirror cat dog uncle aunt sofa pillow cousin curtain attic cellar
noun staircase cradle puppy clock vase neighbour guest cushion doll
act clean paint invite scold embrace furnish decorate kiss
do knock yawn snore giggle quarrel relax babble chatter
adj snug tidy small hospitable quiet untidy cheerful sleepy old comfortable shabby kind spotless domestic roomy
adj festive
name Anna Peter Emma Thomas Lucy Henry Rosa George
)";

} // namespace trainer
