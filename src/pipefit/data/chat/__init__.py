"""Chat data: conversations rendered by a chat template, with a loss on their answers, packed into rows.

`messages` reads conversations, `template` renders them, and `answers` finds the answers in the text. `encode` turns a
conversation into ids with marks, `packing` puts conversations into rows, and `corpus` stores and opens them.
"""
