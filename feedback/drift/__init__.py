"""Whether the drafter still accepts what it did: references, charts and the monitor over them."""
