"""First contact with a machine's GPUs: ``python -m seq1f1b doctor --gpus``.

Parts (:mod:`~seq1f1b.first_contact.parts`) have cases, which run in processes of their own, a process for a rank
(:mod:`~seq1f1b.first_contact.rank`). A supervisor starts them, ends those that hang and keeps what they leave
(:mod:`~seq1f1b.first_contact.supervisor`). What came of it is one page (:mod:`~seq1f1b.first_contact.page`).
"""
