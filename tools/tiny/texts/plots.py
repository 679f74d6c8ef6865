"""Templates of the stories: openings, plots and endings, filled in by tools/tiny/texts/stories.py."""

Beat = tuple[str, ...]  # alternative texts of one part of a story; an empty one makes the part optional

OPENINGS: Beat = (
    "Once upon a time, there was {a_hero} named {name}. {He} lived {home}.",
    "Once upon a time, {a_hero} named {name} lived {home}.",
    "Once upon a time there lived {a_hero}. {His} name was {name}, and {he} lived {home}.",
    "A long time ago, in a small village, there lived {a_hero} named {name}.",
    "A long time ago, in a small village, {a_hero} named {name} had a dear friend. The friend was called {friend}.",
    "There was once {a_hero} named {name}. {He} lived {home}.",
    "There was {a_hero} who lived {home}. {His} name was {name}.",
    "One day, {a_hero} named {name} went to {place}.",
    "One day, {name} and {friend} were playing near {place}. {Name} was {a_hero}.",
    "In a land far away lived {a_hero}. Everyone called {him} {name}.",
    "{Name} was {a_hero}. {He} lived {home}.",
    "{Name} was {a_hero} who loved {place}.",
    "It was a {weather} morning. {Name}, {a_hero}, woke up early.",
)
ANIMAL_OPENINGS: Beat = (
    "The {kind} sat by the door and looked at the sky. {His} name was {name}.",
    "The {kind} was called {name}. {He} lived {home}.",
    "The {kind} named {name} was very {temper}. {He} lived {home}.",
    "The {temper} {kind} lived {home}. {His} name was {name}.",
    "The {kind} and the {friend_kind} were good friends. The {kind} was called {name} and the {friend_kind} was called"
    " {friend}.",
)
MIDDLE_OPENINGS: Beat = (
    "",
    "{His} best friend was {a_friend} named {friend}.",
    "{He} had a good friend, {a_friend} named {friend}.",
    "Every day {he} played with {friend}, {a_friend}.",
    "{He} liked to walk to {place} with {his} friend {friend}.",
)

LOST: tuple[Beat, ...] = (
    (
        "{Name} had {a_thing}. {He} took it everywhere.",
        "{Name} loved {his} {thing} more than anything.",
        "For {his} birthday, {name} got {a_thing}.",
        "{His} mother had given {him} {a_thing}.",
    ),
    (
        "One {weather} day, the {thing} was gone.",
        "But one morning {he} could not find the {thing}.",
        "One day {he} went to {place} and lost the {thing}.",
        "Then one day, on the way to {place}, the {thing} fell out of {his} bag.",
    ),
    (
        "{He} looked under the bed and behind the door, but it was not there.",
        '"Where is my {thing}?" {he} cried.',
        "{Name} was very sad and sat down to cry.",
        "{He} looked here and there, but {he} could not see it.",
    ),
    (
        '{Friend} saw {him} and asked, "Why are you so sad?" "I lost my {thing}," said {name}.',
        '"Do not cry," said {friend}. "I will help you look for the {thing}."',
        '{Friend} came and said, "Let us look together."',
    ),
    (
        "They walked to {place} and looked all around.",
        "First they asked {helper}, but {helper_he} had not seen it. Then they went to {place}.",
        "So the two friends went back to {place}.",
        "",
    ),
    (
        "At last, {friend} found the {thing} {spot}.",
        "Then {name} saw something {colour} {spot}. It was the {thing}!",
        'There it was, {spot}! "I found it!" shouted {friend}.',
    ),
    (
        '"Thank you, {friend}," said {name}. "You are a good friend."',
        "{Name} hugged {friend} and held the {thing} tight.",
        "{Name} was so {feeling} that {he} danced around {friend}.",
    ),
)
SHARE: tuple[Beat, ...] = (
    (
        "One day {he} had {food} for lunch.",
        "One {weather} day, {helper} gave {him} {food}.",
        '{His} grandmother gave {him} {food} and said, "Do not eat it all at once."',
    ),
    (
        "{He} went to {place} to eat it.",
        "{He} sat down near {place} and was about to eat.",
        "On the way to {place} {he} met {friend}.",
    ),
    (
        "There {he} saw {friend}, who looked very tired and hungry.",
        '{Friend} came by and said, "I have had nothing to eat all day."',
        "{Friend} was sitting there all alone, and {friend_he} had no food.",
    ),
    (
        '{Name} thought for a moment. "We can share," {he} said.',
        '"Here, take half of it," said {name}.',
        "{Name} wanted to keep it all, but then {he} looked at {friend} and smiled.",
    ),
    (
        "{He} cut it in two and gave one half to {friend}.",
        "So they sat down {spot} and ate together.",
        '{Friend} took a bite and said, "This is the best lunch I ever had."',
    ),
    (
        "The next day, {friend} brought {a_thing} for {name}.",
        '"You were kind to me," said {friend}. "One day I will be kind to you."',
        "After lunch they played near {place} until it was dark.",
        "",
    ),
)
RESCUE: tuple[Beat, ...] = (
    (
        "One {weather} day {he} went to {place} and heard a small voice.",
        "One day, near {place}, {name} heard someone cry.",
        "When {he} was walking near {place}, {he} saw something move {spot}.",
    ),
    (
        "It was a baby {baby}. It was stuck {spot}.",
        "A little {baby} sat {spot}. Its leg was hurt.",
        "There was a little {baby}, and it could not get home.",
    ),
    (
        '"Please help me," said the {baby}.',
        '"Do not be afraid," said {name}. "I will help you."',
        "The {baby} was cold and afraid.",
    ),
    (
        "{Name} ran to get {friend}. Together they pulled and pulled, until the {baby} was free.",
        "{Name} put the {baby} in {his} {colour} hat and carried it home.",
        "{He} called {helper}, and {helper_he} knew what to do.",
        "{Name} gave the {baby} some water and {food}.",
    ),
    (
        "Soon the {baby} felt much better.",
        "After a few days, the {baby} was well again.",
        "The {baby} looked at {name} and smiled.",
    ),
    (
        '"Thank you, {name}," said the {baby}. "I will never forget you."',
        "From then on, the {baby} came to see {name} every day.",
        "Later, the {baby} brought {name} {a_thing} to say thank you.",
        "{Friend} asked {name} about the {baby}, and {name} told {friend_him} the whole story.",
    ),
)
FEAR: tuple[Beat, ...] = (
    (
        "{Name} was afraid of {fear}.",
        "There was one thing {he} did not like. {He} was afraid of {fear}.",
        "{He} was happy, but {he} was very much afraid of {fear}.",
    ),
    (
        "When the others went to {place}, {he} stayed at home.",
        '"I cannot go to {place}," {he} told {friend}. "I am too afraid."',
        "{Friend} often asked {him} to come to {place}, but {he} always said no.",
    ),
    (
        "One {weather} day, {friend} did not come home from {place}.",
        "One day, {friend} left {friend_his} {thing} at {place} and was very sad.",
        'One evening, {helper} came and said, "{Friend} is lost near {place}!"',
    ),
    (
        '"I must go," said {name}. "{Friend} needs me."',
        "{Name} took a deep breath and went out of the door.",
        "{Name} was afraid of {fear}, but {he} went to {place} all the same.",
    ),
    (
        "{He} walked on and on, and {he} sang a song to be brave.",
        "{His} heart beat fast, but {he} did not stop.",
        "{He} thought of {friend} and walked faster.",
        "",
    ),
    (
        'At last {he} saw {friend} {spot}. "You came!" said {friend}.',
        "There was {friend}, {spot}. They were both so {feeling}.",
        "{He} found {friend} {spot}, and they went home hand in hand.",
    ),
    (
        "After that day, {name} was not afraid of {fear} any more.",
        '"You are the bravest {kind} I know," said {friend}.',
        'Now {name} knew that {he} could be brave. "It was not so bad," {he} said.',
    ),
)
BUILD: tuple[Beat, ...] = (
    (
        "One day {he} wanted to make {craft}.",
        '"I want to make {craft}," said {name} one {weather} morning.',
        "{Name} saw {craft} at {place} and wanted to have one too.",
    ),
    (
        "{He} took some wood, some paper and some {colour} paint.",
        "{He} worked all morning with {friend}.",
        "{Friend} came to help, and they worked for a long time.",
    ),
    (
        "But it broke on the first day.",
        "But when {he} tried it near {place}, it fell apart.",
        "At first it did not work at all, and {name} was angry.",
    ),
    (
        '"I will never try again," said {name}.',
        '"Try again," said {friend}. "You can do it."',
        "{Name} wanted to give up.",
        "{He} sat down {spot} and thought about it.",
    ),
    (
        'Then {helper} came by. "Go slowly," {helper_he} said, "and do one thing at a time."',
        "{Helper} showed {him} how to tie a good knot.",
        '"May I help?" asked {helper}. "I made {craft} when I was young."',
    ),
    (
        "So {name} started again, and this time it was strong and good.",
        "The next day {name} and {friend} tried again, and it worked!",
        "{Name} worked until the evening, and then it was done.",
    ),
    (
        "{He} painted it {colour} and showed it to {friend}.",
        '"Look, {friend}!" said {name}. "We made it!"',
        "Everyone came to {place} to see it.",
    ),
)
GIFT: tuple[Beat, ...] = (
    (
        "Tomorrow was the birthday of {friend}.",
        "It was {friend}'s birthday, and {name} had no gift.",
        "{Name} wanted to give {friend} something nice.",
    ),
    (
        '"What can I give to {friend}?" {he} asked {helper}.',
        "{He} had no money, so {he} went to {place} to think.",
        "{He} looked in every shop, but everything cost too much.",
    ),
    (
        "Then {he} saw {a_thing} {spot}.",
        '"Take this {thing}," said {helper}. "I do not need it."',
        "At home {he} had {a_thing}. {He} loved it, but {he} loved {friend} more.",
    ),
    (
        "{He} cleaned the {thing} and put it in a box.",
        "{He} put a {colour2} ribbon on the {thing}.",
        "{He} ran to {friend} with the {thing} in {his} bag.",
    ),
    (
        '"Happy birthday, {friend}!" said {name}.',
        '"This is for you," said {name}.',
        "{Friend} opened the door, and {name} gave {friend_him} the {thing}.",
    ),
    (
        '"{A_thing}!" said {friend}. "That is what I always wanted."',
        "{Friend} looked at the {thing} and laughed.",
        '{Friend} smiled. "It is beautiful. Thank you, {name}."',
    ),
    (
        "Then they ate {food} together.",
        "They played with the {thing} all day.",
        "",
    ),
)
SORRY: tuple[Beat, ...] = (
    (
        "{Friend} had {a_thing}, and {name} wanted it.",
        "One day {friend} showed {name} {a_thing}.",
        "{Friend} always played with {a_thing} at {place}.",
    ),
    (
        "When {friend} was not looking, {name} took the {thing}.",
        '"Give it to me!" said {name}, and {he} pulled at the {thing} until it broke.',
        "{Name} hid the {thing} {spot} and did not say a word.",
    ),
    (
        "{Friend} looked for the {thing} and began to cry.",
        "{Friend} was very sad and went home.",
        '"Where is my {thing}?" asked {friend}. {Name} said nothing.',
    ),
    (
        "That night {name} could not sleep.",
        "{Name} felt bad, and {he} could not eat.",
        '{Helper} saw it and said, "You should tell the truth."',
    ),
    (
        'In the morning {he} went to {friend}. "I am sorry," {he} said. "I took your {thing}."',
        "The next day, {name} brought back the {thing} and said sorry.",
        "So {he} went to {friend}'s house and told {friend_him} the truth about the {thing}.",
    ),
    (
        '"I was angry," said {friend}, "but now you told me. Let us be friends again."',
        '{Friend} thought about it. Then {friend_he} said, "I forgive you, {name}."',
        "{Friend} smiled and took {his} hand.",
    ),
    (
        "They went to {place} and played with the {thing} together.",
        "Then they ate {food} and laughed.",
        "",
    ),
)
FIND: tuple[Beat, ...] = (
    (
        "One {weather} day, {name} found {a_thing} {spot}.",
        "One day {he} was walking near {place}, and {he} saw {a_thing} {spot}.",
        "When {name} was digging near {place}, {he} found {a_thing}.",
    ),
    (
        '"Whose {thing} is this?" {he} asked.',
        "{He} had never seen such a fine {thing}.",
        '"I could keep it," {he} thought, "but someone may be looking for it."',
    ),
    (
        'First {he} went to {friend}. "Is this your {thing}?" "No," said {friend}, "mine is {colour2}."',
        "{He} showed the {thing} to {friend}, but it was not {friend_his}.",
        "{He} asked everyone at {place2}, but nobody knew.",
    ),
    (
        '"Let us ask {helper}," said {friend}.',
        "Then {he} met {helper}, who was looking for something.",
        "At {place2} they met {helper}.",
    ),
    (
        '"That is my {thing}!" said {helper}. "I lost it long ago."',
        '"Oh, my {thing}!" said {helper}, and {helper_he} laughed with joy.',
        "{Helper} looked at the {thing} and began to cry, because {helper_he} was so {feeling}.",
    ),
    (
        "{Helper} thanked {name} and gave {him} {food}.",
        '"You are an honest {kind}, {name}," {helper_he} said.',
        "As a thank you, {name} and {friend} got {food}.",
    ),
)
STORM: tuple[Beat, ...] = (
    (
        "One day {name} and {friend} went to {place}.",
        "One {weather} morning, {name} asked {friend} to come to {place}.",
        '"Let us go to {place}," said {friend} one day, and {name} said yes.',
    ),
    (
        "{Name} took {food}, and {friend} took {a_thing}.",
        "They played a game with {a_thing}.",
        "They ran and sang and looked for flowers.",
    ),
    (
        "Suddenly the sky became dark, and it began to rain.",
        "Then a strong wind came, and the rain began to fall.",
        "After a while they heard loud thunder.",
    ),
    (
        '"We must find a dry place," said {name}.',
        '"I am cold," said {friend}. "What shall we do?"',
        '"Quick, follow me!" said {name}.',
    ),
    (
        "They ran to {place2} and waited {spot}.",
        "They hid {spot} and told each other stories.",
        "They knocked at the door of {helper}, and {helper_he} let them in.",
    ),
    (
        "At last the rain stopped, and they saw a rainbow over {place}.",
        "When the sun came out again, everything was wet and bright.",
        "In the evening the storm was over, and the stars came out.",
    ),
    (
        '"That was fun," said {friend}. "Let us do it again."',
        "They walked home and had {food} by the fire.",
        "",
    ),
)
PLOTS = (LOST, SHARE, RESCUE, FEAR, BUILD, GIFT, SORRY, FIND, STORM)
ENDINGS: Beat = (
    "From that day on, {name} and {friend} were best friends.",
    "And {name} and {friend} lived happily ever after.",
    "That night {name} went to bed with a smile.",
    "{Name} went home and told {his} mother all about it.",
    "{Name} never forgot that day at {place}.",
    "And if you go to {place}, you can still see {name} and {friend} there.",
    "{Name} was {feeling}, and {friend} was {feeling} too.",
    "It was the best day of the year for {name} and {friend}.",
    "That is the story of {name} the {kind} and {friend} the {friend_kind}.",
)
LAST: Beat = ("", "", "", "The end.")
