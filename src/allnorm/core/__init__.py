"""The steps of a call: `call.py` describes a call, and `dispatch.py` runs the steps in order."""
