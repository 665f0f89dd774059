#!/usr/bin/env python3
"""Tests semmoe_convert.py on files that real torch and NumPy wrote (tests/data/import/make.py), on files that try something, and on files
with changed bytes: test_convert.py. Needs nothing but Python."""
import contextlib, io, json, pathlib, pickletools, random, shutil, struct, subprocess, sys, tempfile, tracemalloc, unittest, zipfile

HERE = pathlib.Path(__file__).resolve().parent
DATA = HERE.parent / "tests/data/import"
sys.path.insert(0, str(HERE))
from semmoe_convert import Refused, convert, unpickle

READ = {
    "PROTO", "FRAME", "MARK", "STOP", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE",
    "SHORT_BINUNICODE", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM",
    "SETITEMS", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BINPERSID",
}


def archive(*entries, method=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as out:
        for name, content in entries:
            out.writestr(name, content)
    return file.getvalue()


def pickle(*opcodes):
    """A protocol 2 pickle of these opcodes."""
    return b"\x80\x02" + b"".join(opcodes) + b"."


def pt(opcodes, storage=bytes(24)):
    """A .pt file of a pickle and one storage "0"."""
    return archive(("a/data.pkl", opcodes), ("a/data/0", storage))


def text(value):
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def integer(number):
    return b"\x8a\x08" + struct.pack("<q", number)


def numbers(*values):
    return b"(" + b"".join(map(integer, values)) + b"t"


def storage(kind, elements, key="0", tag="storage"):
    return b"(" + text(tag) + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu") + integer(elements) + b"tQ"


def tensor(stored, offset, sizes, strides, more=b""):
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + stored + integer(offset) + sizes + strides + b"\x89ccollections\nOrderedDict\n)R" + more + b"tR"


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def convert(self, content, name="file.pt"):
        """The arrays by name: element type, shape, bytes."""
        path = self.folder / name
        path.write_bytes(content)
        out = self.folder / "out.safetensors"
        out.unlink(missing_ok=True)
        convert(path, out)
        raw = out.read_bytes()
        end = 8 + struct.unpack("<Q", raw[:8])[0]
        self.assertEqual(end % 8, 0)
        return {name: (value["dtype"], value["shape"], raw[end + value["data_offsets"][0] : end + value["data_offsets"][1]]) for name, value in json.loads(raw[8:end]).items()}

    def refused(self, content, *said, name="file.pt"):
        with self.assertRaises(Refused) as caught:
            self.convert(content, name)
        for part in said:
            self.assertIn(part, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))
        self.assertEqual([path.name for path in self.folder.iterdir() if "safetensors" in path.name], [], "nothing was written")


class RealFiles(Case):
    def ints(self, array):
        width = {"I64": "q", "I32": "i", "I16": "h", "I8": "b", "U8": "B"}
        return [value for (value,) in struct.iter_unpack("<" + width[array[0]], array[2])]

    def test_converted_files_are_those_that_the_import_is_tested_with(self):
        converted = sorted((DATA / "converted").iterdir())
        self.assertGreaterEqual(len(converted), 12)
        for expected in converted:
            out = self.folder / expected.name
            convert(DATA / expected.stem, out)
            self.assertEqual(out.read_bytes(), expected.read_bytes(), expected.name)

    def test_views_kinds_and_plain_values(self):
        for name in ("views.pt", "views_protocol_4.pt"):
            found = self.convert((DATA / name).read_bytes())
            self.assertEqual((found["part"][1], self.ints(found["part"])), ([3, 2], [8, 9, 14, 15, 20, 21]))
            self.assertEqual((found["turned"][1], self.ints(found["turned"])[:6]), ([6, 4], [0, 6, 12, 18, 1, 7]))
            self.assertEqual((found["scalar"][1], self.ints(found["scalar"])), ([], [7]))
            self.assertEqual(found["empty"][1:], ([0, 3], b""))
            self.assertEqual(found["shared.0"], found["shared.1"])
            for kind, dtype in (("float64", "F64"), ("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16"), ("int64", "I64"), ("int32", "I32"),
                                ("int16", "I16"), ("int8", "I8"), ("uint8", "U8")):
                array = found[f"kinds.torch.{kind}"]
                self.assertEqual((array[0], array[1]), (dtype, [3]))
                if dtype[0] != "F" and dtype != "BF16":
                    self.assertEqual(self.ints(array), [0, 1, 2])
            self.assertEqual(found["kinds.torch.float32"][2], struct.pack("<3f", 0, 1, 2))
            # None, the text and the empty tuple and dict are left out.
            others = {name.split(".")[1]: array for name, array in found.items() if name.startswith("others.")}
            self.assertEqual(sorted(others, key=int), ["0", "1", "3", "4", "5", "6", "8", "9", "11"])
            self.assertEqual([others[at] for at in "01"], [("BOOL", [], b"\1"), ("BOOL", [], b"\0")])
            self.assertEqual([self.ints(others[at]) for at in ("3", "4", "5", "8", "9", "11")], [[-5], [2**40], [-(2**40)], [70000], [300], []])
            self.assertEqual(others["6"], ("F64", [], struct.pack("<d", 1.5)))

    def test_the_same_counts_in_every_form(self):
        read = lambda name: self.convert((DATA / name).read_bytes(), name)
        expected = self.ints(read("logcnt.pt")["array"])
        self.assertEqual((len(expected), expected[7], expected[8], expected[31]), (32, 0, 3 * 8 + 3 * 32, 3 * 31 + 3 * 32))
        for name in ("logcnt_strided.pt", "logcnt.npy", "fortran.npy"):
            self.assertEqual(self.ints(read(name)["array"]), expected, name)
        npz = read("logcnt.npz")
        self.assertEqual((list(npz), self.ints(npz["logical_count"])), (["logical_count"], expected))

    def test_records_of_a_dump(self):
        found = self.convert((DATA / "per_token_0.pt").read_bytes())
        self.assertEqual(self.ints(found["records.0.input_ids"]), [1, 2, 3, 4, 50, 60, 70])
        self.assertEqual(self.ints(found["records.0.extend_seq_lens"]), [4, 3])
        self.assertNotIn("records.1.extend_seq_lens", found, "None")
        self.assertEqual((found["records.3.input_ids"][1], found["records.0.topk_ids_of_layer"][1]), ([0], [4, 7, 8]))

    def test_what_is_not_read_says_why(self):
        for name, said in (
            ("legacy.pt", "before 1.6"), ("objects.npy", "`|O`"), ("big.npy", "`>i4`"), ("compressed.npz", "numpy.savez"), ("config.json", "expected .pt"),
        ):
            self.refused((DATA / name).read_bytes(), said, name=name)
        self.refused((DATA / "compressed.npz").read_bytes(), "compressed", name="compressed.npz")
        self.refused((DATA / "logcnt.npy").read_bytes(), "not an archive")
        self.refused((DATA / "logcnt.npz").read_bytes(), "data.pkl")
        self.refused((DATA / "logcnt.pt").read_bytes(), "not a NumPy array", name="file.npy")
        with self.assertRaisesRegex(Refused, "not a regular file"):
            convert(DATA, self.folder / "out")
        with self.assertRaises(FileNotFoundError):
            convert(DATA / "absent.pt", self.folder / "out")

    def test_the_command(self):
        run = lambda *words: subprocess.run([sys.executable, HERE / "semmoe_convert.py", *map(str, words)], cwd=self.folder, capture_output=True, text=True)
        for name in ("stat.pt", "logcnt.npy"):
            shutil.copy(DATA / name, self.folder)
        done = run("stat.pt", "logcnt.npy")
        self.assertEqual((done.returncode, done.stdout), (0, "stat.pt.safetensors: 2 arrays\nlogcnt.npy.safetensors: 1 arrays\n"))
        done = run(DATA / "legacy.pt", "--out", ".")
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1))
        self.assertIn("before 1.6", done.stderr)
        self.assertEqual(len(list(self.folder.iterdir())), 4)


class Archives(Case):
    def test_entries_are_stored_whole_and_apart(self):
        none = pickle(b"N")
        self.assertEqual(self.convert(pt(none)), {})
        self.refused(archive(("a/data.pkl", none), ("a/data/0", bytes(64)), method=zipfile.ZIP_DEFLATED), "compressed")
        whole = archive(("a/data.pkl", none), ("a/data/0", bytes(64)))
        directory = struct.unpack("<I", whole[-6:-2])[0]
        second = whole.index(b"PK\1\2", directory + 4)

        def lying(at, form, *values):
            changed = bytearray(whole)
            struct.pack_into(form, changed, second + at, *values)
            return bytes(changed)

        for length in (65 + 200, 2**32 - 2):
            self.refused(lying(20, "<II", length, length), "archive")
        self.refused(lying(8, "<H", 1), "encrypted")
        self.refused(lying(20, "<I", 3), "compressed or encrypted")
        self.refused(lying(42, "<I", 1), "has no header")
        self.refused(lying(42, "<I", 2**32 - 2), "an entry's header ends")
        # Many names for the same bytes: a small file would count as a large one.
        many = bytearray(archive(("a/data.pkl", none), ("a/big", bytes(2000)), *((f"a/data/{number}", b"") for number in range(40))))
        place = many.index(b"PK\1\2", many.index(b"PK\1\2") + 4)
        header, sizes, at = many[place + 42 : place + 46], many[place + 20 : place + 28], place
        while (at := many.find(b"PK\1\2", at + 4)) >= 0:
            many[at + 42 : at + 46], many[at + 20 : at + 28] = header, sizes
        self.refused(bytes(many), "overlap")
        with contextlib.redirect_stderr(io.StringIO()), self.assertWarns(UserWarning):
            double = archive(("a/data.pkl", none), ("a/data.pkl", none))
        self.refused(double, "twice")
        self.refused(archive(("a/data.pkl", none), ("b/data.pkl", none)), "2 files `data.pkl`")
        self.refused(archive(("data.pkl", none)), "0 files `data.pkl`")
        self.refused(archive(("a/data.pkl", none), ("a/byteorder", b"big")), "byte order is b'big'")
        self.assertEqual(self.convert(archive(("a/data.pkl", none), ("a/byteorder", b"little"))), {})

    def test_the_end_is_at_the_end(self):
        whole = pt(pickle(b"N"))
        for cut in range(len(whole)):
            self.refused(whole[:cut])
        self.refused(b"", "an empty file")
        self.refused(b"\x80\x02N.", "a bare pickle")
        at = len(whole) - 22
        for where, changed in ((10, b"\3"), (10, b"\1"), (12, b"\xff\xff\xff\x7f"), (16, b"\xff\xff\xff\x7f")):
            with contextlib.suppress(Refused):
                # A count that omits one entry does no harm; every other change is refused.
                self.assertEqual(self.convert(whole[: at + where] + changed + whole[at + where + len(changed) :]), {})

    def test_tensors_that_share_bytes_are_written_twice_at_most(self):
        one = tensor(storage("ByteStorage", 400_000), 0, numbers(400_000), numbers(1))
        self.assertEqual(len(self.convert(pt(pickle(b"(", one * 2, b"t"), bytes(400_000)))), 2)
        self.refused(pt(pickle(b"(", one * 20, b"t"), bytes(400_000)), "more than twice the file")


class Pickles(Case):
    def test_all_other_opcodes_are_refused_by_name(self):
        self.assertLessEqual(READ, {opcode.name for opcode in pickletools.opcodes})
        # Whatever an argument may be: a length of one byte, a line, two lines.
        for opcode in pickletools.opcodes:
            if opcode.name in READ:
                continue
            argument = {"INT": b"1\n", "LONG": b"1L\n", "FLOAT": b"1\n", "STRING": b"'a'\n", "GET": b"0\n", "PUT": b"0\n"}.get(opcode.name, b"\0" * 12 + b"\naaaa\n")
            self.refused(pt(pickle(b"(]}NN", opcode.code.encode("latin-1"), argument)), f"opcode {opcode.name}, which is never executed here, at byte 7")
        self.refused(pt(pickle(b"\1")), "damaged")

    def test_other_names_are_refused_and_never_called(self):
        for module, name in (
            ("os", "system"), ("posix", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("torch", "load"), ("torch", "UntypedStorage"),
            ("torch._utils", "_rebuild_parameter"), ("torch.storage", "_load_from_bytes"), ("collections", "OrderedDict.fromkeys"),
            ("numpy.core.multiarray", "_reconstruct"),
        ):
            self.refused(pt(pickle(f"c{module}\n{name}\n(".encode(), text("true"), b"tR")), f"{module}.{name}", "never imported here")
            self.refused(pt(pickle(text(module), text(name), b"\x93)R")), f"{module}.{name}", "never imported here")
        self.refused(pt(pickle(text("os"), text("sys\x1b[2Jtem"), b"\x93")), "sys\\x1b[2Jtem")
        for opcodes in (b"ctorch\nFloatStorage\n)R", b"ccollections\nOrderedDict\n]\x85R", b"K\x01)R", b"ccollections\nOrderedDict\nNR"):
            self.refused(pt(pickle(opcodes)), "calls something else")
        self.refused(pt(pickle(b"cos")), "damaged")
        self.refused(pt(pickle(b"NN\x93")), "never imported")

    def test_tensors_stay_within_their_storage(self):
        whole = struct.pack("<3q", 7, 8, 9)
        make = lambda sizes, strides, offset: pt(pickle(tensor(storage("LongStorage", 3), offset, numbers(*sizes), numbers(*strides))), whole)
        for sizes, strides, expected in (((3,), (1,), [7, 8, 9]), ((2,), (2,), [7, 9]), ((1, 3), (9, 1), [7, 8, 9]), ((0, 2**40), (1, 1), [])):
            dtype, shape, content = self.convert(make(sizes, strides, 0))["array"]
            self.assertEqual((dtype, shape, content), ("I64", list(sizes), struct.pack(f"<{len(expected)}q", *expected)))
        self.assertEqual(self.convert(make((2,), (1,), 1))["array"][2], struct.pack("<2q", 8, 9))
        top = 2**63 - 1
        for sizes, strides, offset, said in (
            ((4,), (1,), 0, "within the 3 elements"), ((3,), (1,), 1, "within the 3 elements"), ((2,), (3,), 0, "within the 3 elements"),
            ((2,), (-1,), 1, "numbers from 0 on"), ((-1,), (1,), 0, "numbers from 0 on"), ((3,), (1,), -1, "numbers from 0 on"),
            ((top,), (1,), 0, "within the 3 elements"), ((top, top), (1, 1), 0, "within the 3 elements"), ((2,), (top,), 0, "within the 3 elements"),
            ((2, 2), (top, top), top, "within the 3 elements"), ((2**40,), (0,), 0, "no repeated elements"),
            ((2, 2, 2), (1, 1, 0), 0, "no repeated elements"), ((2, 2), (1, 1), 0, "within the 3 elements"), ((1, 2), (1,), 0, "one for each of the sizes"),
            ((1,) * 9, (1,) * 9, 0, "at most 8"),
        ):
            self.refused(make(sizes, strides, offset), said)

    def test_tensors_are_made_of_what_torch_makes_them_of(self):
        longs, ones = storage("LongStorage", 3), numbers(1)
        float_size = b"G" + struct.pack(">d", float("nan")) + b"\x85"
        self.refused(pt(pickle(tensor(longs, 0, float_size, ones))), "sizes is (nan,)")
        self.refused(pt(pickle(tensor(longs, 0, b"]", ones))), "sizes is []")
        self.refused(pt(pickle(tensor(b"N", 0, ones, ones))), "calls something else")
        self.refused(pt(pickle(b"ctorch._utils\n_rebuild_tensor_v2\n)R")), "calls something else")
        self.refused(pt(pickle(tensor(longs, 0, ones, ones, b"}"))), "metadata")
        self.assertEqual(self.convert(pt(pickle(tensor(longs, 0, ones, ones, b"N"))))["array"][1], [1])
        for kind, elements, said in (
            ("LongStorage", 4, "24 bytes, expected 4 elements of 8 bytes"), ("LongStorage", 2, "24 bytes"), ("IntStorage", 3, "3 elements of 4 bytes"),
            ("LongStorage", -3, "24 bytes"), ("DoubleStorage", 2**63 - 1, "24 bytes"),
        ):
            self.refused(pt(pickle(storage(kind, elements))), said)
        self.refused(pt(pickle(storage("LongStorage", 3, key="../1"))), "data/../1")
        self.refused(pt(pickle(storage("LongStorage", 3, tag="module"))), "another persistent id")
        self.refused(pt(pickle(b"K\x01Q")), "another persistent id")

    def test_cycles_and_depth_cost_nothing(self):
        # A list that contains itself, and nested lists; dropping them must not crash.
        self.refused(pt(pickle(b"]q\x00h\x00a")), "8 deep")
        for opcodes in (b"]" * 8_000 + b"a" * 7_999, b")" + b"\x85" * 8_000):
            self.refused(pt(pickle(opcodes)), "8 deep")
        self.refused(pt(pickle(b"]" * 20_000 + b"a" * 19_999)), "more memory")
        self.refused(pt(pickle(b"}" + b")" + b"\x85" * 8_000 + b"Ns")), "keys are not texts")

    def test_bombs_are_not_unpacked(self):
        # Each list contains the previous one ten times: 10^7 values in a file of a few hundred bytes.
        laughs = b"]q\x00" + b"".join(b"]q" + bytes([level]) + b"(" + b"h" + bytes([level - 1]) + (b"h" + bytes([level - 1])) * 9 + b"e" for level in range(1, 8))
        self.refused(pt(pickle(b"(", laughs, b"t")), "more often than the file has bytes")
        self.refused(pt(pickle(b"(" + b"]" * 20_000 + b"t")), "more memory")
        self.refused(pt(pickle(b"N" + integer(0) + b"r\xff\xff\xff\x7f")), "gives the number 2147483647", "next number")
        self.refused(pt(pickle(b"h\x05")), "asks for the number 5")
        # A long key above many values: the names together would be far larger than the file.
        self.refused(pt(pickle(b"}" + text("k" * 1_000_000) + b"(" + b"\x88" * 1000 + b"ts")), "names of the arrays")

    def test_numbers_and_texts_are_as_long_as_they_are(self):
        self.refused(pt(pickle(b"\x8a\xff" + b"\1" * 255)), "more than 8 bytes")
        self.refused(pt(pickle(b"\x8b\xff\xff\xff\x7f")), "damaged")
        self.refused(pt(pickle(b"X\xff\xff\xff\xff" + b"short")), "damaged")
        self.refused(pt(pickle(b"\x8c\xffshort")), "damaged")
        self.refused(pt(b""), "damaged")
        self.refused(pt(b"\x80\x02N"), "damaged")
        for protocol in (1, 6):
            self.refused(pt(bytes([0x80, protocol]) + b"N."), "2 to 5")
        self.refused(pt(pickle(b"NN")), "one in all")
        for opcodes in (b"a", b"]a", b"e", b"](a", b"s", b"}Ns", b"}(Nu", b"t", b"R", b"Q", b"q\x00", b"N(\x85", b"Na", b"]NNs", b"NNNs", b"N("):
            self.refused(pt(pickle(opcodes)), "pickle")
        for number in (0, 1, -1, 127, 128, -128, 2**63 - 1, -(2**63)):
            for length in range(max(1, (number.bit_length() + 8) // 8), 9):
                whole = pickle(b"\x8a" + bytes([length]) + number.to_bytes(length, "little", signed=True))
                self.assertEqual(unpickle(whole, None), number)

    def test_names_of_arrays_are_unicode_and_once(self):
        one = b"K\x01"
        self.refused(pt(pickle(b"}(" + text("a.b") + one + text("a") + b"}" + text("b") + one + b"su")), "two arrays are called 'a.b'")
        self.refused(pt(pickle(b"}" + text("__metadata__") + one + b"s")), "metadata")
        self.refused(pt(pickle(b"}X\3\0\0\0\xed\xa0\x80" + one + b"s")), "Unicode")

    def test_memory_is_bounded_by_the_file(self):
        """At most 64 bytes for each byte of a pickle, plus the fixed allowance."""
        pieces = (b"]", b"}", b")", b"N", b"]\x94", b"N\x94", b"N\x85", b"}NNs", b"]Na", b"M\x01\x02", b"\x8c\x02ab", integer(2**40), b"G" + bytes(8))
        for piece in pieces:
            for repeats in (10, 1000, 100_000):
                batch = b"(" + piece * 500 + b"t"
                whole = pickle(b"]" + (batch + b"a") * (repeats // 500 + 1))
                tracemalloc.start()
                with contextlib.suppress(Refused):
                    unpickle(whole, lambda key: None)
                taken = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                self.assertLessEqual(taken, 64 * len(whole) + (4 << 20), (piece, len(whole)))
        # Announced sizes are not trusted.
        for hostile in (
            b"X\xff\xff\xff\x7f", b"B\xff\xff\xff\x7f", b"\x96" + b"\xff" * 7 + b"\x00", b"Nr\xff\xff\xff\x0f",
            tensor(storage("LongStorage", 1), 0, numbers(2**40), numbers(0)), storage("DoubleStorage", 2**50),
        ):
            tracemalloc.start()
            with contextlib.suppress(Refused):
                unpickle(pickle(hostile), lambda key: (0, 8))
            taken = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            self.assertLess(taken, 1 << 20)


class AnyBytes(Case):
    def test_changed_files_are_converted_or_refused(self):
        names = ("views.pt", "per_token_0.pt", "stat.pt", "routes.npz", "logcnt.npy", "views_protocol_4.pt")
        generator = random.Random(1)
        ended = {True: 0, False: 0}
        for turn in range(2000):
            name = names[turn % len(names)]
            content = bytearray((DATA / name).read_bytes())
            if generator.random() < 0.2:
                del content[generator.randrange(len(content)) :]
            for _ in range(generator.randrange(8)):
                if content:
                    content[generator.randrange(len(content))] = generator.randrange(256)
            ended[self.ends(bytes(content), pathlib.Path(name).suffix)] += 1
        self.assertGreater(min(ended.values()), 100)

    def test_any_opcodes_end(self):
        generator = random.Random(2)
        opcodes = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes if opcode.name in READ]
        whole = (DATA / "views.pt").read_bytes()
        with zipfile.ZipFile(io.BytesIO(whole)) as file:
            real = next(file.read(name) for name in file.namelist() if name.endswith("data.pkl"))
        for turn in range(4000):
            body = bytearray(real if turn % 2 else b"".join(generator.choices(opcodes, k=generator.randrange(400))))
            for _ in range(generator.randrange(6)):
                if body:
                    body[generator.randrange(len(body))] = generator.randrange(256)
            with contextlib.suppress(Refused):
                unpickle(pickle(bytes(body)) if turn % 2 == 0 else bytes(body), lambda key: (0, 8))

    def ends(self, content, suffix):
        try:
            self.convert(content, "file" + suffix)
            return True
        except Refused:
            return False


if __name__ == "__main__":
    unittest.main()
