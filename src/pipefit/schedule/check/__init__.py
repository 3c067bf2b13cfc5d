"""What makes a schedule valid: its rules, the deadlock check, and the drawing of the first fault."""
