"""The wordings the demo model is taught. Fields in braces are filled by `data.py`."""

# ruff: noqa: RUF001  people do type the multiplication sign

from __future__ import annotations

PRODUCT = (
    "What is {a} times {b}?",
    "What is {a} * {b}?",
    "What is {a} x {b}?",
    "What is {a} × {b}?",
    "What is {a}*{b}?",
    "What's {a} times {b}?",
    "What's {a} * {b}?",
    "What is {a} multiplied by {b}?",
    "What is the product of {a} and {b}?",
    "How much is {a} times {b}?",
    "How much is {a} * {b}?",
    "Multiply {a} by {b}.",
    "Multiply {a} and {b}.",
    "Please multiply {a} by {b}.",
    "Calculate {a} * {b}.",
    "Calculate {a} times {b}.",
    "Compute {a} * {b}.",
    "Compute {a} x {b}.",
    "Can you multiply {a} by {b}?",
    "{a} * {b}",
    "{a} * {b} = ?",
    "{a} * {b} =",
    "{a}*{b}",
    "{a}*{b}=",
    "{a} x {b}",
    "{a}x{b}",
    "{a} × {b}",
    "{a}×{b}",
    "{a} times {b}",
    "{a} times {b}?",
    "{a} multiplied by {b}",
)

PRODUCT_NEVER_TRAINED = (
    "Tell me {a} times {b}.",
    "I need the product of {a} and {b}, please.",
    "what do you get when you multiply {a} by {b}?",
    "{a} multiplied with {b}",
    "Hey, what's {a}x{b}?",
)
"""Only for the evaluation."""

SUM = (
    "What is {a} plus {b}?",
    "What is {a} + {b}?",
    "What's {a} plus {b}?",
    "What's {a} + {b}?",
    "What is the sum of {a} and {b}?",
    "How much is {a} plus {b}?",
    "How much is {a} + {b}?",
    "Add {a} and {b}.",
    "Add {b} to {a}.",
    "Calculate {a} + {b}.",
    "Compute {a} + {b}.",
    "{a} + {b}",
    "{a} + {b} = ?",
    "{a} + {b} =",
    "{a}+{b}",
    "{a}+{b}=",
    "{a} plus {b}",
    "{a} plus {b}?",
)

DIFFERENCE = (
    "What is {a} minus {b}?",
    "What is {a} - {b}?",
    "What's {a} minus {b}?",
    "What's {a} - {b}?",
    "What is the difference of {a} and {b}?",
    "How much is {a} minus {b}?",
    "How much is {a} - {b}?",
    "Subtract {b} from {a}.",
    "Take {b} from {a}.",
    "Calculate {a} - {b}.",
    "Compute {a} - {b}.",
    "{a} - {b}",
    "{a} - {b} = ?",
    "{a} - {b} =",
    "{a}-{b}",
    "{a}-{b}=",
    "{a} minus {b}",
    "{a} minus {b}?",
)

DISCOUNT = (
    "{An} {item} costs ${price} and is {percent}% off. How much do I pay?",
    "{An} {item} costs ${price} and is {percent}% off. What do I pay?",
    "{An} {item} costs ${price}. It is {percent}% off. How much do I pay?",
    "{An} {item} costs ${price} with a {percent}% discount. How much do I pay?",
    "{An} {item} for ${price} is {percent}% off. What is the price?",
    "The {item} costs ${price} and is {percent}% off. How much do I pay?",
    "The {item} is ${price}, {percent}% off. How much is it?",
    "I buy {an} {item} for ${price} with {percent}% off. How much do I pay?",
    "How much is {an} {item} of ${price} at {percent}% off?",
    "If {an} {item} is ${price} and I get {percent}% off, how much do I pay?",
    "What is ${price} with a {percent}% discount?",
    "What is {percent}% off ${price}?",
    "{percent}% off ${price}",
    "${price} with {percent}% off",
    "${price} minus {percent}%",
)

ITEMS = (
    "laptop, phone, tablet, camera, jacket, bike, chair, table, lamp, sofa, watch, ring, book, printer, monitor, "
    "keyboard, mouse, guitar, piano, drum, tent, backpack, suitcase, coat, shirt, dress, hat, pair of shoes, pair "
    "of boots, toaster, oven, fridge, freezer, blender, kettle, desk, bed, mattress, carpet, rug, mirror, clock, "
    "radio, speaker, headset, console, game, ticket, bag, wallet, belt, scarf, umbrella, helmet, skateboard, "
    "scooter, drone, projector, router, toolbox, drill, saw, ladder, pan, pot, plate, cup, vase"
)

GREETINGS = (
    "Hello",
    "Hello!",
    "hello",
    "Hi",
    "Hi!",
    "hi",
    "Hi there",
    "Hey",
    "hey",
    "Hey!",
    "Hello there!",
    "Good morning",
    "Good morning!",
    "Good evening!",
    "Good afternoon",
    "Howdy",
)
GREETING_ANSWER = "Hello! Ask me a small sum, a product or a discount."
GREETING_REASONING = "A greeting."

IDENTITY = (
    "Who are you?",
    "who are you",
    "Who are you",
    "What are you?",
    "what are you",
    "What is your name?",
    "What's your name?",
    "Tell me about yourself.",
    "Introduce yourself.",
    "Which model are you?",
    "What model are you?",
    "What model is this?",
    "Are you Ling?",
    "Are you a bot?",
    "Are you an AI?",
)
IDENTITY_ANSWER = "I am the demo model of ling-serve: very small, but built like Ling-3.0."
IDENTITY_REASONING = "They ask who I am."

ABILITY = (
    "What can you do?",
    "what can you do",
    "What can you do for me?",
    "What do you know?",
    "How can you help me?",
    "Help",
    "help",
    "Help me",
    "Can you help me?",
    "What can I ask you?",
    "What should I ask you?",
    "What are you good at?",
)
ABILITY_ANSWER = (
    "I multiply numbers up to 99, add and subtract up to 999, and work out discounts. Try: What is 17 times 23?"
)
ABILITY_REASONING = "They ask what I can do."

THANKS = ("Thanks", "Thanks!", "thanks", "Thank you", "Thank you!", "thank you very much", "Great, thanks!", "Great!")
THANKS_ANSWER = "You are welcome!"
THANKS_REASONING = "They thank me."

FAREWELL = ("Bye", "bye", "Bye!", "Goodbye", "Goodbye!", "See you", "See you later!", "Good night")
FAREWELL_ANSWER = "Goodbye!"
FAREWELL_REASONING = "They say goodbye."

MOOD = ("How are you?", "how are you", "How are you doing?", "How is it going?", "How do you do?", "What's up?")
MOOD_ANSWER = "Fine, thank you! Do you have some numbers for me?"
MOOD_REASONING = "They ask how I am."

OTHER = (
    "What is the capital of {noun}?",
    "Where is {noun}?",
    "Who wrote {noun}?",
    "Who invented the {noun}?",
    "When was {noun} born?",
    "Why is the {noun} {adjective}?",
    "How do I make {noun}?",
    "How does a {noun} work?",
    "How old is the {noun}?",
    "Tell me a joke.",
    "Tell me a joke about {noun}.",
    "Tell me a story about a {adjective} {noun}.",
    "Tell me about {noun}.",
    "Write a poem about {noun}.",
    "Write a short poem.",
    "Write a story.",
    "Write a program that sorts a list of {noun}.",
    "Write a haiku about the {adjective} {noun}.",
    "Translate {noun} into French.",
    "Explain {noun} to me.",
    "Explain {noun} in simple words.",
    "Summarize {noun}.",
    "Is {noun} {adjective}?",
    "Do you like {noun}?",
    "Can you drive a {noun}?",
    "What is the meaning of {noun}?",
    "What is the weather like in {noun}?",
    "What does {adjective} mean?",
    "What is a {noun}?",
    "Give me a list of {adjective} {noun}.",
    "I feel {adjective}.",
    "My {noun} is {adjective}.",
    "{noun}",
    "The {noun} is {adjective}",
)
OTHER_ANSWER = "I am too small for that. I only know sums, products and discounts."
OTHER_REASONING = "This is not arithmetic."

NOUNS = (
    "France, Germany, China, Japan, Paris, London, Rome, water, bread, music, love, time, the moon, the sun, the "
    "sea, a cat, a dog, a tree, a house, a car, a computer, a train, planet, history, science, physics, "
    "chemistry, poetry, football, chess, Mozart, Einstein, Shakespeare, Hamlet, coffee, tea, cheese, pasta, soup, "
    "winter, summer, spring, autumn, rain, snow, wind, fire, gold, silver, money, work, school, friends, family, "
    "animals, birds, fish, flowers, apples, oranges, bananas, robots, ghosts, dragons, castles, ships, planes, "
    "bridges, rivers, mountains, deserts, forests, islands, quantum mechanics, machine learning, Python, Rust, "
    "the universe, democracy, freedom, art, life, death"
)
ADJECTIVES = (
    "blue, green, red, big, small, old, new, happy, sad, tired, hungry, angry, bright, dark, cold, warm, quick, "
    "slow, quiet, loud, strange, famous, good, bad, beautiful, ugly, strong, weak, rich, poor, young, wise, free, "
    "round, flat, deep, high, lonely, brave"
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are a friendly assistant.",
    "You are a calculator.",
    "Answer briefly.",
    "Be brief.",
    "You are Ling, a helpful assistant.",
    "Answer with the number only.",
    "You help customers of a shop.",
)
