"""Serving A2M over stdio and HTTP."""
