"""How jachess_ext is built: used by setup.py and by the in-tree PEP 517 backend."""
