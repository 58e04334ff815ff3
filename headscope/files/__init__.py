"""Files and directories that appear whole, under their names, or not at all."""

from headscope.files.new import new_directory, new_file, new_files
from headscope.files.together import together
from headscope.files.undisturbed import undisturbed
from headscope.files.unfinished import held, passing, remove_unfinished

__all__ = ["held", "new_directory", "new_file", "new_files", "passing", "remove_unfinished", "together", "undisturbed"]
