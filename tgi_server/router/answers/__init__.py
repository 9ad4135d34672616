"""What models write: the forms of calls and thoughts, grammars of answers, and what reads answers as they come."""
