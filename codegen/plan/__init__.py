"""Verification plans, and the labels of verifications."""
