"""How a call is made. `call.py` describes one; `dispatch.py` is its way; the rest are its steps."""
