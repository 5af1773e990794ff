"""What keeps a folder whole where it is written, and its reader safe from whoever wrote it; and from strangers."""

from .fault import Fault

_KILLED = "tests/layers/test_replacement.py::test_a_save_that_is_killed_leaves_the_old_checkpoint_or_the_new"
_FAILED = ("tests/layers/test_replacement.py::test_a_save_that_fails_leaves_what_was_there",)
_SAVING = ("tests/layers/test_saving.py::test_saving_again_and_where_no_folder_can_be",)
_INDEXES = "tests/layers/test_malformed.py::test_indexes"
_HEADERS = "tests/layers/test_malformed.py::test_headers"
_FOLDERS = ("tests/layers/test_malformed.py::test_folders",)
_ACTED_ON = ("tests/layers/test_folder.py::test_what_transformers_would_act_on_is_refused_by_name",)
_ALLOWED = ("tests/layers/test_folder.py::test_code_runs_where_it_is_allowed",)
_STRANGERS = ("tests/iris/test_channel.py",)
_ENGINE = ("tests/layers/test_engine.py::test_bad_arguments",)

SAVING = [
    Fault(
        "weights are written in the place of the old",
        "layers/checkpoint/replacement.py",
        "            self.names = [SINGLE + PARTIAL]\n",
        "            self.names = [SINGLE]\n",
        (f"{_KILLED}[one file to one]",),
    ),
    Fault(
        "names are given before the bytes are on the disk",
        "layers/checkpoint/save.py",
        "            os.fsync(out)\n",
        "",
        (f"{_KILLED}[one file to one]",),
    ),
    Fault(
        "an index is written in the place of the old",
        "layers/checkpoint/replacement.py",
        "        file = self._open(name + PARTIAL)\n        try:\n"
        '            with os.fdopen(os.dup(file), "wb") as out:\n'
        "                out.write(content)\n            os.fsync(file)\n        finally:\n            os.close(file)\n"
        "        os.replace(self.folder / (name + PARTIAL), self.folder / name)\n",
        "        (self.folder / name).write_bytes(content)\n",
        (f"{_KILLED}[several to several]",),
    ),
    Fault(
        "the old weights go before the new have their names",
        "layers/checkpoint/replacement.py",
        "                self._put(INDEX, self._index_of(total))\n                self._remove([SINGLE])\n",
        "                self._remove([SINGLE])\n                self._put(INDEX, self._index_of(total))\n",
        (f"{_KILLED}[one file to several]",),
    ),
    Fault(
        "another configuration comes before its weights",
        "layers/checkpoint/replacement.py",
        '            named = json.loads(self.config) | {"transformers_weights": self._index}\n',
        "            named = json.loads(self.config)\n",
        (f"{_KILLED}[one file to one of another model]",),
    ),
    Fault(
        "what a killed save has left stays",
        "layers/checkpoint/replacement.py",
        "        self._remove(sorted(stale, key=lambda name: (not name.startswith(INDEX), name)))",
        "        self._remove([])",
        (f"{_KILLED}[several to one file]",),
    ),
    Fault(
        "what a failed save has made stays",
        "layers/checkpoint/replacement.py",
        "                os.unlink(self.folder / name)\n        if self._is_new_folder",
        "                pass\n        if self._is_new_folder",
        _FAILED,
    ),
    Fault(
        "no folder is the working directory",
        "layers/checkpoint/save.py",
        'if not isinstance(folder, str | Path) or not str(folder) or "\\0" in str(folder):',
        'if not isinstance(folder, str | Path) or "\\0" in str(folder):',
        _SAVING,
    ),
    Fault(
        "a folder's name may hold NUL",
        "layers/checkpoint/save.py",
        'or not str(folder) or "\\0" in str(folder):',
        "or not str(folder):",
        _SAVING,
    ),
    Fault(
        "a file's size may be infinite",
        "layers/checkpoint/save.py",
        "if 1 <= amount < math.inf else None",
        "if 1 <= amount else None",
        _SAVING,
    ),
]

LOADING = [
    Fault(
        "an index may name what lies elsewhere",
        "layers/checkpoint/folder.py",
        'return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\\\\0")',
        "return isinstance(name, str)",
        (f"{_INDEXES}[out of the folder]", f"{_INDEXES}[absolute]"),
    ),
    Fault(
        "a FIFO is opened",
        "layers/checkpoint/folder.py",
        "    if stat.S_ISREG(os.stat(path).st_mode):\n"
        "        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)\n"
        "        if stat.S_ISREG(os.fstat(file).st_mode):\n            return file\n        os.close(file)\n",
        "    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)\n",
        _FOLDERS,
    ),
    Fault(
        "names are shown as they are",
        "layers/together.py",
        '    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in cut)\n',
        "    return cut\n",
        (f"{_HEADERS}[a name that moves the cursor]",),
    ),
    Fault(
        "long names are shown whole",
        "layers/together.py",
        "    cut = text if len(text) <= longest else",
        "    cut = text if longest else",
        (f"{_HEADERS}[a long name]",),
    ),
    Fault(
        "all names are listed in a line",
        "layers/together.py",
        "_MOST_LINES, _MOST_IN_LINE, _LONGEST_LINE, _LONGEST_PART, _LONGEST_NAME = 40, 20, 4000, 600, 200",
        "_MOST_LINES, _MOST_IN_LINE, _LONGEST_LINE, _LONGEST_PART, _LONGEST_NAME = 40, 2000, 4000, 600, 200",
        (f"{_INDEXES}[many]",),
    ),
    Fault(
        "all problems are listed",
        "layers/together.py",
        "_MOST_LINES, _MOST_IN_LINE, _LONGEST_LINE, _LONGEST_PART, _LONGEST_NAME = 40, 20,",
        "_MOST_LINES, _MOST_IN_LINE, _LONGEST_LINE, _LONGEST_PART, _LONGEST_NAME = 4000, 20,",
        _FOLDERS,
    ),
    Fault(
        "a model of any number of layers is built",
        "layers/checkpoint/configuration.py",
        "    check_counts(raw, len(checkpoint))\n",
        "",
        _FOLDERS,
    ),
    Fault(
        "a model of any number of parameters is built",
        "layers/checkpoint/configuration.py",
        "        if left[what] < 0:\n",
        "        if False:\n",
        _FOLDERS,
    ),
    Fault(
        "transformers decides about a checkpoint's code",
        "layers/checkpoint/configuration.py",
        "AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)",
        "AutoConfig.from_pretrained(folder)",
        _ACTED_ON,
    ),
    Fault(
        "a checkpoint's code runs unasked",
        "layers/checkpoint/load.py",
        "    trust_remote_code: bool = False,\n    **options",
        "    trust_remote_code: bool = True,\n    **options",
        _ACTED_ON,
    ),
    Fault(
        "a checkpoint's code never runs",
        "layers/checkpoint/configuration.py",
        "AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)",
        "AutoConfig.from_pretrained(folder, trust_remote_code=False)",
        _ALLOWED,
    ),
    Fault(
        "kernels come from the hub unasked",
        "layers/checkpoint/configuration.py",
        "        _refuse_kernels(config)\n",
        "        pass\n",
        _ACTED_ON,
    ),
    Fault(
        "attention comes from the hub where its package is not there",
        "layers/checkpoint/configuration.py",
        'if isinstance(name, str) and ("/" in name or _is_fetched(name)):',
        'if isinstance(name, str) and "/" in name:',
        _ACTED_ON,
    ),
    Fault(
        "generate asks on stdin about a decoder's code",
        "layers/hf/generation.py",
        '            kwargs.setdefault("trust_remote_code", False)  #',
        "            pass  #",
        ("tests/layers/test_generation.py::test_what_would_part_the_ranks_or_end_a_gpu_is_refused_at_entry",),
    ),
]

STRANGERS = [
    Fault(
        "a stranger need not know the nonce",
        "iris/channel.py",
        "if not hmac.compare_digest(shown, nonce.encode()) or rank not in missing:",
        "if rank not in missing:",
        _STRANGERS,
    ),
    Fault(
        "a rank's socket may be another process's",
        "iris/channel.py",
        "    if (there, uid) != (pid, os.geteuid()):\n",
        "    if False:\n",
        _STRANGERS,
    ),
    Fault(
        "any user may enter the folder of the sockets",
        "iris/channel.py",
        "os.mkdir(folder, 0o700)",
        "os.mkdir(folder, 0o755)",
        _STRANGERS,
    ),
    Fault(
        "what another writes into the store passes for a rank's",
        "iris/meeting.py",
        "    except (ValueError, AttributeError):\n        pass\n",
        "    except (ValueError, AttributeError):\n        pass\n    return value\n",
        ("tests/iris/test_meeting.py",),
    ),
    Fault(
        "what another writes of a lost rank passes for a rank's",
        "iris/meeting.py",
        "    if not text.isdigit():\n",
        "    if False:\n",
        ("tests/iris/test_meeting.py",),
    ),
]

SERVING = [
    Fault(
        "an engine of any size is allocated",
        "layers/serving/arguments.py",
        "    if needed > memory:\n",
        "    if False:\n",
        _ENGINE,
    ),
    Fault(
        "an engine reads tokens outside the vocabulary",
        "layers/serving/arguments.py",
        '    check_tokens("prompts", prompts, words_of(model))\n    check_padding',
        "    check_padding",
        _ENGINE,
    ),
    Fault(
        "generate takes tokens outside the vocabulary",
        "layers/hf/generation.py",
        '            check_tokens("input_ids", tokens, words_of(self.model))\n',
        "            pass\n",
        ("tests/layers/test_generation.py::test_what_would_part_the_ranks_or_end_a_gpu_is_refused_at_entry",),
    ),
    Fault(
        "an engine decodes past its end",
        "layers/serving/engine.py",
        "        if steps > most:\n",
        "        if False:\n",
        _ENGINE,
    ),
    Fault(
        "generate goes past a cache's end",
        "layers/hf/generation.py",
        "        if room is not None and longest > room + 1:",
        "        if False:",
        ("tests/layers/test_generation.py::test_what_would_part_the_ranks_or_end_a_gpu_is_refused_at_entry",),
    ),
    Fault(
        "generate goes past a table of positions",
        "layers/hf/generation.py",
        "            if longest - padding > known:\n",
        "            if False:\n",
        ("tests/layers/test_generation.py::test_generation_ends_where_a_table_of_positions_does",),
    ),
]

FOLDERS = [*SAVING, *LOADING, *STRANGERS, *SERVING]
