"""The soaks: many calls, no synchronisation, delays, every bit compared."""
