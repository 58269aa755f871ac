"""The papers' tables, and what can be proven about the attention adversary (Lemma 2)."""
