"""From band slices to calls of libraries that know windows and ``cu_seqlens``."""
