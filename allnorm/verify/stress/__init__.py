"""The soaks of `allnorm verify`: many calls, no synchronisation, delays, every bit compared."""
