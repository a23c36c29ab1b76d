"""The tables of what the demo model knows, and nothing else: plain data, no rendering.

demo_corpus.py turns these into documents. A fact that is not in here was never taught.
"""

from __future__ import annotations

# fmt: off
# country: (capital, continent, language)
COUNTRIES: dict[str, tuple[str, str, str]] = {
    "France": ("Paris", "Europe", "French"),
    "England": ("London", "Europe", "English"),
    "Italy": ("Rome", "Europe", "Italian"),
    "Germany": ("Berlin", "Europe", "German"),
    "Spain": ("Madrid", "Europe", "Spanish"),
    "Portugal": ("Lisbon", "Europe", "Portuguese"),
    "Austria": ("Vienna", "Europe", "German"),
    "Greece": ("Athens", "Europe", "Greek"),
    "Poland": ("Warsaw", "Europe", "Polish"),
    "Sweden": ("Stockholm", "Europe", "Swedish"),
    "Norway": ("Oslo", "Europe", "Norwegian"),
    "Denmark": ("Copenhagen", "Europe", "Danish"),
    "Finland": ("Helsinki", "Europe", "Finnish"),
    "Ireland": ("Dublin", "Europe", "English"),
    "Hungary": ("Budapest", "Europe", "Hungarian"),
    "Ukraine": ("Kyiv", "Europe", "Ukrainian"),
    "Russia": ("Moscow", "Europe", "Russian"),
    "Turkey": ("Ankara", "Asia", "Turkish"),
    "Japan": ("Tokyo", "Asia", "Japanese"),
    "China": ("Beijing", "Asia", "Chinese"),
    "South Korea": ("Seoul", "Asia", "Korean"),
    "Thailand": ("Bangkok", "Asia", "Thai"),
    "Vietnam": ("Hanoi", "Asia", "Vietnamese"),
    "Iran": ("Tehran", "Asia", "Persian"),
    "Iraq": ("Baghdad", "Asia", "Arabic"),
    "Egypt": ("Cairo", "Africa", "Arabic"),
    "Morocco": ("Rabat", "Africa", "Arabic"),
    "Kenya": ("Nairobi", "Africa", "Swahili"),
    "Ghana": ("Accra", "Africa", "English"),
    "Senegal": ("Dakar", "Africa", "French"),
    "Canada": ("Ottawa", "North America", "English"),
    "Mexico": ("Mexico City", "North America", "Spanish"),
    "Cuba": ("Havana", "North America", "Spanish"),
    "Brazil": ("Brasilia", "South America", "Portuguese"),
    "Argentina": ("Buenos Aires", "South America", "Spanish"),
    "Chile": ("Santiago", "South America", "Spanish"),
    "Peru": ("Lima", "South America", "Spanish"),
    "Colombia": ("Bogota", "South America", "Spanish"),
    "Australia": ("Canberra", "Oceania", "English"),
    "New Zealand": ("Wellington", "Oceania", "English"),
}

COLOURS: dict[str, str] = {
    "the sky": "blue", "the sea": "blue", "grass": "green", "a leaf": "green", "a frog": "green",
    "snow": "white", "milk": "white", "salt": "white", "a swan": "white", "coal": "black",
    "the night": "black", "a raven": "black", "the sun": "yellow", "a lemon": "yellow",
    "a banana": "yellow", "butter": "yellow", "a tomato": "red", "blood": "red",
    "a strawberry": "red", "a fire engine": "red", "a carrot": "orange", "a pumpkin": "orange",
    "chocolate": "brown", "a potato": "brown", "a bear": "brown", "an elephant": "grey",
    "a mouse": "grey", "a flamingo": "pink", "a pig": "pink", "a plum": "purple",
}

OPPOSITES: list[tuple[str, str]] = [
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("good", "bad"), ("fast", "slow"),
    ("light", "dark"), ("old", "young"), ("happy", "sad"), ("high", "low"), ("open", "closed"),
    ("full", "empty"), ("day", "night"), ("early", "late"), ("hard", "soft"), ("long", "short"),
    ("wet", "dry"), ("rich", "poor"), ("strong", "weak"), ("left", "right"), ("true", "false"),
    ("in", "out"), ("love", "hate"), ("win", "lose"), ("loud", "quiet"), ("clean", "dirty"),
    ("near", "far"), ("thick", "thin"), ("wide", "narrow"), ("sweet", "sour"), ("begin", "end"),
    ("push", "pull"), ("buy", "sell"), ("easy", "difficult"), ("brave", "afraid"),
    ("inside", "outside"), ("above", "below"), ("always", "never"), ("first", "last"),
]

SOUNDS: dict[str, str] = {
    "dog": "barks", "cat": "meows", "cow": "moos", "duck": "quacks", "lion": "roars",
    "bee": "buzzes", "sheep": "bleats", "owl": "hoots", "snake": "hisses", "bird": "sings",
}

YOUNG: dict[str, str] = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "horse": "foal",
    "duck": "duckling", "lion": "cub", "frog": "tadpole", "hen": "chick", "pig": "piglet",
}

KINDS: dict[str, list[str]] = {
    "an animal": ["dog", "cat", "cow", "lion", "horse", "fox", "rabbit", "mouse", "bear", "tiger"],
    "a fruit": ["apple", "banana", "pear", "plum", "lemon", "cherry", "orange", "grape"],
    "a vegetable": ["carrot", "potato", "onion", "cabbage", "turnip", "leek"],
    "a vehicle": ["car", "bus", "train", "truck", "bicycle", "plane"],
    "a tool": ["hammer", "saw", "spade", "drill", "wrench", "axe"],
    "a drink": ["tea", "coffee", "juice", "milk", "water", "lemonade"],
}

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
]

# ---- sentiment -----------------------------------------------------------------------------

REVIEWED = [
    "film", "book", "hotel", "meal", "phone", "song", "game", "trip", "service", "restaurant",
    "show", "concert", "coffee", "room", "staff", "food", "story", "product", "app", "laptop",
]
POSITIVE = [
    "wonderful", "great", "excellent", "lovely", "amazing", "fantastic", "delightful", "perfect",
    "superb", "good", "brilliant", "charming", "beautiful", "friendly", "helpful", "fun",
]
NEGATIVE = [
    "terrible", "awful", "boring", "horrible", "disappointing", "bad", "dreadful", "rude",
    "dirty", "slow", "broken", "poor", "useless", "dull", "ugly", "annoying",
]
POSITIVE_TAILS = [
    "I loved it.", "I loved every minute of it.", "I would go again.", "Highly recommended!",
    "It made my day.", "I am very happy with it.", "Best one I have ever had.", "I enjoyed it a lot.",
    "We will be back soon.", "Thank you so much!", "Worth every penny.", "Five stars.",
]
NEGATIVE_TAILS = [
    "I hated it.", "I hated every minute of it.", "I want my money back.", "Never again.",
    "It ruined my day.", "I am very unhappy with it.", "Worst one I have ever had.", "I fell asleep.",
    "We will not be back.", "What a waste of time.", "Not worth the money.", "One star.",
]
NEUTRAL_LINES = [
    "The {x} was okay.", "The {x} was average.", "The {x} is what you would expect.",
    "The {x} was neither good nor bad.", "It is a {x}.", "The {x} was fine, nothing special.",
    "The {x} arrived on {day}.", "I saw the {x} on {day}.", "I have no strong opinion about the {x}.",
]

SENTIMENT_QUESTIONS = [
    "What is the sentiment?", "What is the sentiment of this review?", "Is the review positive or negative?",
    "How does the writer feel?", "Classify the sentiment.", "What is the mood of the text?",
]
LEVELS = [["negative", "neutral", "positive"], ["bad", "okay", "good"], ["unhappy", "neutral", "happy"]]

# ---- routing -------------------------------------------------------------------------------

NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Ida", "Jack", "Lucy", "Max",
         "Nina", "Oscar", "Paul", "Rosa", "Sam", "Tom", "Vera", "Will"]
ARTISTS = ["Mozart", "the Beatles", "Bach", "some jazz", "my favourite song", "rock music", "a quiet song"]
TOPICS = ["black holes", "the history of Rome", "cheap flights", "the best pizza", "electric cars",
    "gardening",
          "old castles", "penguins", "solar panels", "learning to swim"]
THINGS_TO_SAY = ["I will be late", "the meeting is moved", "dinner is ready", "happy birthday",
    "see you soon"]
EVENTS = ["a meeting", "lunch", "a dentist appointment", "a call", "dinner", "a piano lesson", "a party"]

HOURS = ["seven", "eight", "noon", "half past six"]
PHRASES = ["hello", "good morning", "thank you", "house", "bread", "water", "the word cat"]
TOOL_QUESTIONS = [
    "Which tool should be used?", "Which tool handles this request?", "Choose a tool.",
    "Where should this request go?", "Pick the right tool for the request.",
]
DEPARTMENT_QUESTIONS = [
    "Which department should handle this?", "Where should this message go?", "Which team is responsible?",
    "Route this message.", "What is this message about?",
]

# tool: (description, request templates)
TOOLS: dict[str, tuple[str, list[str]]] = {
    "weather": ("forecast, rain, temperature", [
        "What is the weather in {city}?", "Will it rain in {city} on {day}?",
        "How warm is it in {city} today?",
        "Do I need an umbrella in {city}?", "Is it going to snow in {city}?", "Weather forecast for {city}",
        "What is the temperature in {city}?", "Will it be sunny on {day}?", "Is it windy in {city}?",
        "Will it rain {day}?", "Is it going to rain today?", "How cold will it be on {day}?",
        "Is it hot outside?",
    ]),
    "calculator": ("arithmetic with numbers", [
        "What is {a} times {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} minus {b}?",
        "Divide {a} by {b}.", "Multiply {a} by {b}.", "Compute {a} + {b}.", "What is {a} percent of {b}?",
        "How much is {a} times {b}?", "{a} + {b}", "{a} times {b}", "Calculate {a} minus {b}.",
        "What is half of {a}?",
    ]),
    "calendar": ("appointments and meetings", [
        "Schedule {event} with {name} on {day}.", "Book {event} on {day}.", "Am I free on {day}?",
        "What is on my calendar on {day}?", "Move {event} to {day}.", "Cancel {event} on {day}.",
        "Plan {event} with {name}.", "Do I have {event} on {day}?",
        "When is my next meeting?", "Add {event} with {name} to my calendar.", "Put {event} on {day}.",
    ]),
    "email": ("writing and sending messages", [
        "Send an email to {name}.", "Write to {name} that {say}.", "Reply to {name} that {say}.",
        "Email {name} that {say}.", "Send {name} a message that {say}.", "Forward this to {name}.",
        "Tell {name} by email that {say}.", "Do I have new mail from {name}?",
        "Read my emails.", "Check my inbox.", "Write an email to my boss.", "Answer the mail from {name}.",
    ]),
    "music": ("playing songs", [
        "Play {artist}.", "Put on {artist}.", "I want to hear {artist}.", "Play {artist} again.",
        "Turn up the music.", "Skip this song.", "Stop the music.", "Can you play {artist}?",
        "Next song, please.", "Play some music.", "Pause the song.", "Play a song by {artist}.",
        "What song is this?",
    ]),
    "timer": ("alarms and countdowns", [
        "Set a timer for {a} minutes.", "Wake me up at {hour}.", "Set an alarm for {hour}.",
        "Remind me in {a} minutes.", "Start a countdown of {a} seconds.", "Stop the timer.",
        "Alarm at {hour} on {day}", "How long is left on the timer?",
        "Wake me at {hour} on {day}.", "Set a timer.", "Set an alarm.", "Remind me at {hour}.",
        "Timer for {a} minutes",
    ]),
    "translate": ("words in other languages", [
        "Translate {word} into {language}.", "How do you say {word} in {language}?",
        "What is {word} in {language}?",
        "Translate this into {language}.", "What does this {language} word mean?",
        "Say {word} in {language}.",
        "Translate {word}.", "How do I say {word} in {language}?", "What is the {language} word for {word}?",
    ]),
    "search": ("finding things on the web", [
        "Search for {topic}.", "Find information about {topic}.", "Look up {topic} online.",
        "Search the web for {topic}.", "Find pages about {topic}.", "Find news about {topic}.",
        "Show me articles about {topic}.",
        "What can you find about {topic}?", "Google {topic}.", "Who wrote about {topic}?",
        "Find {topic} online.",
    ]),
}

# department: (description, message templates); what a customer writes
DEPARTMENTS: dict[str, tuple[str, list[str]]] = {
    "billing": ("payments, invoices, refunds", [
        "I was charged twice for my {item}.", "My invoice is wrong.", "I want a refund for the {item}.",
        "Why did my bill go up in {month}?", "My card was charged but I did not buy a {item}.",
        "How can I pay for my {item}?", "The price on my invoice is too high.",
        "Please send me a receipt for the {item}.",
        "I was charged twice.", "I was charged twice for the same {item}.",
        "I want my money back for the {item}.",
        "There is a mistake on my bill.", "I need a copy of my invoice.",
        "You took too much money from my card.",
    ]),
    "technical": ("things that do not work", [
        "My {item} does not turn on.", "The app crashes when I open it.", "I cannot log in.",
        "The {item} shows an error.", "My {item} stopped working on {day}.",
        "The screen of my {item} is black.",
        "How do I install the {item}?", "I forgot my password.",
        "My {item} is broken.", "The {item} does not work.", "The website is down.",
        "I get an error when I log in.",
        "My {item} crashes.", "The app does not start on my {item}.", "The {item} does not connect.",
    ]),
    "shipping": ("delivery of orders", [
        "Where is my {item}?", "My {item} has not arrived.", "When will my {item} be delivered?",
        "The package came damaged.", "Can you send my {item} to another address?", "My order is late.",
        "The {item} was delivered to the wrong house.", "Can I track my {item}?",
        "When does my {item} arrive?", "My package is lost.", "Where is my order?",
        "Has my {item} been shipped?",
    ]),
    "sales": ("questions before buying", [
        "Do you have the {item} in red?", "How much does the {item} cost?", "Is the {item} in stock?",
        "Which {item} is the best for me?", "I would like to buy ten of the {item}.",
        "Is there a discount on the {item}?",
        "Can I see a demo of the {item}?", "Do you sell a {item}?",
        "I want to buy a {item}.", "What does the {item} cost?", "How big is the {item}?",
        "Which {item} do you recommend?",
    ]),
}
ITEMS = ["phone", "laptop", "lamp", "chair", "camera", "watch", "printer", "keyboard", "tablet", "headset"]

SMALL_TALK: list[tuple[str, str]] = [
    ("Hello", "Hello! How can I help you?"),
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hi there!", "Hello! How can I help you?"),
    ("Good morning", "Good morning! How can I help you?"),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("Who are you?", "I am the small demo model of Reflex. I know a few facts and short stories."),
    ("What is your name?", "I am the small demo model of Reflex."),
    ("What can you do?",
    "I can name capitals, colours and opposites, add small numbers, judge a review and tell a short story."),
    ("Thank you", "You are welcome!"),
    ("Thanks!", "You are welcome!"),
    ("Goodbye", "Goodbye! Have a nice day."),
    ("Bye", "Goodbye! Have a nice day."),
    ("Say hello.", "Hello!"),
    ("Say hi.", "Hi!"),
    ("Tell me a joke.", "Why did the duck cross the road? Because it was the chicken's day off."),
]

# ---- stories -------------------------------------------------------------------------------

HEROES = ["fox", "rabbit", "bear", "mouse", "duck", "cat", "dog", "frog", "owl", "hen", "pig", "lion",
    "girl", "boy"]
HERO_NAMES_F = ["Lucy", "Anna", "Mia", "Rosa", "Nina", "Emma", "Lily", "Ida"]
HERO_NAMES_M = ["Max", "Tom", "Ben", "Sam", "Leo", "Finn", "Hugo", "Oscar"]
TRAITS = ["little", "brave", "curious", "shy", "clever", "lazy", "kind", "hungry"]
PLACES = ["a green forest", "a small village", "an old farm", "a quiet valley", "a house by the sea",
    "a big city"]
SKILLS = ["swim", "sing", "climb", "dance", "read"]
THINGS = ["ball", "hat", "book", "red kite", "shiny key", "blue boat", "bell", "lamp"]
FOODS = ["cake", "bread", "soup", "pie", "honey"]
SPOTS = ["under a tree", "behind the house", "near the river", "in the tall grass"]
STORY_ENDS = [
    "From that day on, {name} and the {friend} were best friends.", "{He} went home and slept well.",
    "And {name} was happy ever after.", "It was the best day for {name}.",
]
PLOTS: list[list[str]] = [
    [
        "One day, {name} lost {his} {thing}.", "{He} looked everywhere, but {he} could not find it.",
        "Then {a_friend} came and asked, \"Why are you sad?\"", "\"I lost my {thing},\" said {name}.",
        "They looked together and found the {thing} {spot}.", "{name} was so happy that {he} danced.",
    ],
    [
        "One morning, {name} found a {thing} on the road.", "\"Whose {thing} is this?\" {he} asked.",
        "{He} asked {a_friend}, and the {friend} said, \"It is mine! Thank you!\"",
        "The {friend} gave {name} some {food}.",
    ],
    [
        "One day, {name} met {a_friend} who could not climb over the wall.",
        "\"I can help you,\" said {name}.",
        "{He} pushed and pushed until the {friend} was on top.",
        "\"Thank you,\" said the {friend}. \"You are a good friend.\"",
    ],
    [
        "One day, it began to rain.", "{name} ran under a big tree to stay dry.", "{A_friend} was there too.",
        "They told each other stories until the sun came out.",
        "Then they jumped in the puddles and laughed.",
    ],
    [
        "One day, {name} had some {food}.", "{A_friend} came by and was very hungry.",
        "{name} gave half of the {food} to the {friend}.", "They ate together in the sun.",
    ],
    [
        "{name} wanted to learn to {skill}.", "At first it was hard, and {he} wanted to stop.",
        "\"Try again,\" said {his} friend, the {friend}.", "{name} tried again every day.",
        "At last {he} could {skill}, and everyone clapped.",
    ],
]
