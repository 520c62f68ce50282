"""What is said of a disk that cannot be written names the file and the next step, once; what is not a system error
stays as it is.
"""

import errno

import pytest
from graft_nodes.storage.disk_errors import NEXT_STEPS, add_next_step, explain_disk_errors


@pytest.mark.parametrize("number", NEXT_STEPS)
def test_an_error_of_writing_names_the_file_and_the_next_step_once(number):
    with pytest.raises(OSError) as caught, explain_disk_errors("outer"), explain_disk_errors("place/file"):
        raise OSError(number, "why")  # as write() and fsync() do, without a file
    assert (
        str(caught.value) == f"[Errno {number}] why ({NEXT_STEPS[number]}): 'place/file'"
        and caught.value.errno == number
    )


def test_a_file_that_the_system_names_is_kept():
    assert add_next_step(PermissionError(errno.EACCES, "why", "inner"), "outer").filename == "inner"
    assert isinstance(add_next_step(PermissionError(errno.EACCES, "why", "inner"), "outer"), PermissionError)


def test_other_errors_stay_as_they_are():
    with pytest.raises(FileNotFoundError, match=r"^.Errno 2. No such file: 'file'$"), explain_disk_errors("place"):
        raise FileNotFoundError(errno.ENOENT, "No such file", "file")
    own = OSError("not of the system")
    assert add_next_step(own, "place") is own
