"""Communication time: links, rings, direct collectives, lowerings of uneven collectives."""
