"""The demo model: fetched, converted, checked."""
