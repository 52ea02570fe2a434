"""Contains prompts for the tests: short and long ones, prose, code, numbers, several languages, and a long passage."""

from __future__ import annotations

SHORT = (
    "Once upon a time",
    "The three laws of thermodynamics state that",
    "def fibonacci(n):\n    ",
    "SELECT name, COUNT(*) FROM orders",
    "2, 3, 5, 7, 11, 13,",
    '{"city": "Lisbon", "population":',
    "La capitale de l'Italie est",
    "Der schnellste Weg nach Hause ist",
    "Water boils at 100 degrees because",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is photosynthesis?\nA:",
    "import numpy as np\n\nx = np.linspace(0, 1, 5)\nprint(",
    "The recipe calls for two eggs, a cup of flour and",
    "<html>\n<body>\n<h1>Welcome</h1>\n",
    "In 1969, the first human",
    "A",
    "the the the the the the the the",
    "Translate to French: I would like a cup of coffee.\n",
    "🙂 means happy, 🙁 means",
    (
        "Once there was a fox who could not sleep. Every night he counted the stars above the barn, and "
        "every night he lost count somewhere near the chimney. One evening the owl asked him"
    ),
    (
        "Rules of the game: each player draws five cards. The player with the lowest card begins. On your "
        "turn you may play one card, exchange two, or pass. When the pile is empty,"
    ),
    (
        "for (int i = 0; i < rows; ++i) {\n"
        "  for (int j = 0; j < columns; ++j) {\n"
        "    total += matrix[i][j];\n"
        "  }\n"
        "}\n"
        "// The loop"
    ),
)

PASSAGE = """\
The lighthouse at Marrow Point was built in three years by eleven men and one mule. The mule is \
remembered better than the men, because it walked the same path so often that the path is still there, a \
groove in the rock that fills with rain and in winter with ice. The tower is thirty-one metres high. Its \
walls are two metres thick at the base and half of that at the lantern room, and they are made of granite \
that was cut on the mainland, numbered, shipped and put together again like a puzzle whose solution \
somebody had kept.

A keeper's day had a fixed order. At dusk the lamp was lit and the weights were wound, for the lens \
turned by clockwork, and the clockwork had to be wound every four hours. Between windings the keeper \
wrote the log: wind, sea, visibility, ships that passed and the direction they passed in. At dawn the \
lamp was put out, the curtains were drawn around the lens so that the sun would not be gathered by it and \
set something on fire, and the brass was polished. Nobody has ever found out what would have happened if \
the brass had not been polished. It always was.

There were rules for fog. When the nearer of two rocks could no longer be seen from the gallery, the bell \
was rung once every minute; when the gallery rail could no longer be seen from the door, twice. The bell \
weighs four hundred kilograms and was cast with a flaw, so its note is not quite the one that was \
ordered. Sailors came to know it by that flaw. A replacement was offered in 1911, and the fishermen of \
the village wrote a letter, which survives, to say that they would rather keep the bell that they could \
tell from the others.

The light was made automatic in 1984. A small grey box now does what four men did, and once a year \
somebody comes by boat to look at the box and to replace its battery. The living quarters were let to a \
painter for some summers, then to nobody. In the kitchen there is still a table with a chessboard drawn \
on it in ink, and in the drawer there are thirty-one pieces. The missing one, a white knight, was carved \
again by the painter out of driftwood, and it is the only piece that anyone who visits picks up.

Accounts differ about the night of the great storm. The log says only that the wind was too strong to be \
measured, that the sea came over the gallery, and that the light did not go out. The village says that \
the keeper's daughter, who was twelve, wound the clockwork by herself for nine hours while the three men \
held the door. The log does not mention her. But from the next morning on, the entries are in two hands, \
and the second is a child's.
"""

QUESTIONS = (
    "\nQuestion: How high is the tower?\nAnswer:",
    "\nQuestion: Why did the fishermen want to keep the old bell?\nAnswer:",
    "\nIn one sentence, the passage tells",
)
