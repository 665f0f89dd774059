#!/usr/bin/env python3
"""Converts .pt, .npy and .npz files to safetensors, which `semmoe profile import` reads.

    semmoe-convert expert_distribution_recorder_*.pt

writes FILE.safetensors beside each FILE. Needs nothing but Python 3.9. A .pt file is a pickle, which is a program. It is not executed:
tensors, lists, dicts and numbers are read, every other opcode or name is refused, and memory is bounded by the size of the file.

Every array has a path for a name: `records.0.input_ids`. A list of integers is an array, a number is an array without dimensions, and an
array that is all of a file is called `array`. None and texts are left out."""
import argparse, array, ast, collections, itertools, json, math, os, pathlib, pickletools, re, struct, sys, zipfile

# Element types of torch's storages and of NumPy, as safetensors names them, and their bytes.
STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "LongStorage": "I64",
    "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL",
}
NUMPY = {
    "|b1": "BOOL", "|u1": "U8", "|i1": "I8", "<u2": "U16", "<i2": "I16", "<u4": "U32", "<i4": "I32", "<u8": "U64", "<i8": "I64",
    "<f2": "F16", "<f4": "F32", "<f8": "F64",
}
WIDTH = {"BOOL": 1, "U8": 1, "I8": 1, "BF16": 2, **{kind + bits: int(bits) // 8 for kind in "UIF" for bits in ("16", "32", "64")}}
MAX_DIMENSIONS = 8
MAX_DEPTH = 8
# NumPy's own limit.
MAX_NPY_HEADER = 10_000
# The limit of the safetensors library.
MAX_HEADER = 100_000_000
# torch before 1.6 wrote a bare pickle that begins with this number.
LEGACY = bytes([0x80, 2, 0x8A, 10, 0x6C, 0xFC, 0x9C, 0x46, 0xF9, 0x20, 0x6A, 0xA8, 0x50, 0x19])

# Elements in a file: the place of the first in bytes, sizes and steps in elements.
Array = collections.namedtuple("Array", "dtype at shape strides")
Storage = collections.namedtuple("Storage", "dtype at elements")
# A name in a pickle, kept as a name only.
Name = collections.namedtuple("Name", "name")
ORDERED_DICT, TENSOR = Name("collections OrderedDict"), Name("torch._utils _rebuild_tensor_v2")
NAMES = {name.name: name for name in (ORDERED_DICT, TENSOR, *(Name(f"torch {storage}") for storage in STORAGES))}


class Refused(Exception):
    """Why a file is not converted: one sentence without the name of the file."""


def main():
    parser = argparse.ArgumentParser(prog="semmoe-convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="FILE", nargs="+", type=pathlib.Path, help="a .pt, .pth, .npy or .npz file")
    parser.add_argument("--out", metavar="DIR", type=pathlib.Path, help="the folder to write to [default: that of each file]")
    arguments = parser.parse_args()
    for path in arguments.files:
        out = (arguments.out or path.parent) / f"{path.name}.safetensors"
        try:
            count = convert(path, out)
        except (Refused, OSError) as error:
            sys.exit(f"semmoe-convert: {ascii(str(path))[1:-1]}: {error}")
        print(f"{out}: {count} arrays")


def convert(path, out):
    """Converts one file; returns the number of arrays."""
    if path.exists() and not path.is_file():
        raise Refused("not a regular file")
    with open(path, "rb") as file:
        source = Source(file)
        readers = {".pt": read_torch, ".pth": read_torch, ".npy": lambda source: {"array": read_npy(source, 0, source.length)}, ".npz": read_npz}
        if path.suffix not in readers:
            raise Refused(f"the name ends in {path.suffix!a}, expected .pt, .pth, .npy or .npz")
        arrays = readers[path.suffix](source)
        write(out, source, arrays)
    return len(arrays)


class Source:
    """A file, read in parts that are checked against its length first."""

    def __init__(self, file):
        self.file, self.length = file, file.seek(0, os.SEEK_END)

    def read(self, what, at, length):
        if at < 0 or at + length > self.length:
            raise Refused(f"{what} ends after {max(self.length - max(at, 0), 0)} bytes, expected {length}")
        self.file.seek(at)
        return self.file.read(length)


def archive(source, expected):
    """The entries of a zip archive: where the bytes of each are, and how many. They are stored, and together no more than the file."""
    if source.read("the file", 0, min(4, source.length)) != b"PK\3\4":
        start = source.read("the file", 0, min(len(LEGACY), source.length))
        found = "a file of torch before 1.6" if start == LEGACY else "a bare pickle" if start[:1] == b"\x80" else "not an archive"
        raise Refused(f"{found if start else 'an empty file'}, expected {expected}")
    try:
        listed = zipfile.ZipFile(source.file).infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error, OSError) as error:
        raise Refused(f"the archive is damaged, or was cut: {error}") from None
    entries, total = {}, 0
    for entry in listed:
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.compress_size != entry.file_size:
            raise Refused(f"the entry {entry.filename!a} is compressed or encrypted, expected stored bytes, as torch.save and numpy.savez write them")
        header = source.read("an entry's header", entry.header_offset, 30)
        if header[:4] != b"PK\3\4" or entry.filename in entries:
            raise Refused(f"the entry {entry.filename!a} is there twice, or has no header")
        at = entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
        entries[entry.filename] = at, entry.file_size
        total += 30 + entry.file_size
        if total > source.length or at + entry.file_size > source.length:
            raise Refused(f"the entry {entry.filename!a} reaches beyond the archive, or entries overlap")
    return entries


def read_torch(source):
    """Arrays of a .pt file: NAME/data.pkl, and NAME/data/KEY for each storage."""
    entries = archive(source, "a .pt file as torch.save has written since 1.6")
    pickles = [name for name in entries if re.fullmatch(r"[^/]+/data\.pkl", name)]
    if len(pickles) != 1:
        raise Refused(f"the archive holds {len(pickles)} files `data.pkl`, expected one in one folder")
    prefix = pickles[0][: -len("data.pkl")]
    if prefix + "byteorder" in entries:
        order = source.read("the byte order", *entries[prefix + "byteorder"])
        if order != b"little":
            raise Refused(f"the byte order is {order[:16]!a}, expected little")
    pickle = source.read("the pickle", *entries[pickles[0]])
    return named(unpickle(pickle, lambda key: entries.get(f"{prefix}data/{key}")), source.length)


def read_npz(source):
    entries = archive(source, "a .npz file, as numpy.savez writes it")
    return {name[: -len(".npy")] if name.endswith(".npy") else name: read_npy(source, *place) for name, place in entries.items()}


def read_npy(source, at, length):
    """An array within a file."""
    start = source.read("the array", at, min(length, 12))
    if len(start) < 12 or not start.startswith(b"\x93NUMPY"):
        raise Refused("not a NumPy array, expected a .npy file")
    if start[6] not in (1, 2, 3):
        raise Refused(f"the array's version is {start[6]}, expected 1 to 3")
    data, header = (10, struct.unpack("<H", start[8:10])[0]) if start[6] == 1 else (12, struct.unpack("<I", start[8:])[0])
    if header > MAX_NPY_HEADER or data + header > length:
        raise Refused(f"the array's header is {header} bytes long, expected at most {MAX_NPY_HEADER}, and within the file")
    text = source.read("the array's header", at + data, header).decode("latin-1")
    try:
        fields = ast.literal_eval(text.strip())
        kind, fortran, shape = (fields.pop(key) for key in ("descr", "fortran_order", "shape"))
    except (ValueError, SyntaxError, TypeError, KeyError, AttributeError, MemoryError, RecursionError):
        raise Refused(f"the array's header is {text[:60]!a}, expected a dict of descr, fortran_order and shape") from None
    if fields or type(fortran) is not bool or type(shape) is not tuple:
        raise Refused(f"the array's header is {text[:60]!a}, expected a dict of descr, fortran_order and shape alone")
    if type(kind) is not str or kind not in NUMPY:
        raise Refused(f"the array's element type is `{ascii(kind).strip(chr(39))[:60]}`, expected little-endian numbers")
    numbers("shape", shape)
    found, expected = length - data - header, math.prod(shape) * WIDTH[NUMPY[kind]]
    if found != expected:
        raise Refused(f"the array has {found} bytes, expected {expected} for {list(shape)} of {WIDTH[NUMPY[kind]]} bytes each")
    return Array(NUMPY[kind], at + data + header, shape, dense(shape[::-1])[::-1] if fortran else dense(shape))


def dense(shape):
    """Strides of a contiguous array in row-major order."""
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


def numbers(what, values):
    """A short tuple of non-negative integers."""
    if type(values) is not tuple or len(values) > MAX_DIMENSIONS or any(type(number) is not int or number < 0 for number in values):
        raise Refused(f"an array's {what} is {ascii(values)[:60]}, expected at most {MAX_DIMENSIONS} numbers from 0 on")
    return values


def unpickle(pickle, place):
    """The value of a pickle. No name in it is imported or called: `pickletools` reads the opcodes, and what they mean stands here.

    `place` returns where a storage's bytes are, and how many. Lists, dicts and tuples are at most one for eight bytes of the pickle and
    10,000 more, and numbers in the memo follow each other, so memory is bounded by the pickle's size (`test_convert.py` measures it)."""
    stack, marks, memo, budget = [], [], [], 10_000 + len(pickle) // 8
    wrong = lambda what: Refused(f"the pickle {what} at byte {at}")

    def pop(count):
        if len(stack) - (marks[-1] if marks else 0) < count:
            raise wrong("takes from an empty stack")
        values = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return values

    def above_mark():
        if not marks:
            raise wrong("has no mark")
        values = stack[marks[-1] :]
        del stack[marks.pop() :]
        return values

    def top(kind):
        if len(stack) == (marks[-1] if marks else 0) or type(stack[-1]) is not kind:
            raise wrong(f"adds to something else than a {kind.__name__}")
        return stack[-1]

    try:
        for opcode, argument, at in pickletools.genops(pickle):
            name = opcode.name
            if name in ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"):
                if type(argument) is int and not -(2**63) <= argument < 2**63:
                    raise wrong("has an integer of more than 8 bytes")
                stack.append(argument)
            elif name == "NONE":
                stack.append(None)
            elif name in ("NEWTRUE", "NEWFALSE"):
                stack.append(name == "NEWTRUE")
            elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"):
                budget -= 1
                if budget < 0:
                    raise Refused("the pickle asks for more memory than a file of its size may take")
                if name == "TUPLE":
                    stack.append(tuple(above_mark()))
                else:
                    stack.append({} if name == "EMPTY_DICT" else [] if name == "EMPTY_LIST" else tuple(pop(int(name[5:]) if name[5:].isdigit() else 0)))
            elif name in ("APPEND", "APPENDS"):
                values = pop(1) if name == "APPEND" else above_mark()
                top(list).extend(values)
            elif name in ("SETITEM", "SETITEMS"):
                values = pop(2) if name == "SETITEM" else above_mark()
                if len(values) % 2 or any(type(key) not in (str, int) for key in values[::2]):
                    raise wrong("has a dict whose keys are not texts or integers")
                top(dict).update(zip(values[::2], values[1::2]))
            elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
                number = len(memo) if name == "MEMOIZE" else argument
                if number > len(memo):
                    raise wrong(f"gives the number {number}, expected the next number")
                value = pop(1)
                stack += value
                memo[number : number + 1] = value
            elif name in ("BINGET", "LONG_BINGET"):
                if argument >= len(memo):
                    raise wrong(f"asks for the number {argument}, which was not given")
                stack.append(memo[argument])
            elif name == "MARK":
                marks.append(len(stack))
            elif name in ("GLOBAL", "STACK_GLOBAL"):
                argument = argument if name == "GLOBAL" else " ".join(map(str, pop(2)))
                if argument not in NAMES:
                    raise wrong(f"names {argument.replace(' ', '.')!a}, which is never imported here,")
                stack.append(NAMES[argument])
            elif name == "REDUCE":
                stack.append(call(*pop(2)))
            elif name == "BINPERSID":
                stack.append(storage(*pop(1), place))
            elif name == "PROTO":
                if not 2 <= argument <= 5:
                    raise wrong(f"is of protocol {argument}, expected 2 to 5,")
            elif name == "STOP":
                value = pop(1)
                if stack or marks:
                    raise wrong("ends with several values, expected one in all,")
                return value[0]
            elif name != "FRAME":
                raise wrong(f"has the opcode {name}, which is never executed here,")
    except (ValueError, OverflowError, IndexError, struct.error) as error:
        raise Refused(f"the pickle is damaged: {error}") from None
    raise Refused("the pickle has no end")


def call(function, arguments):
    """The two calls that torch.save writes: an empty dict, and a tensor of (storage, offset, sizes, strides, requires_grad, hooks)."""
    if function == ORDERED_DICT and arguments == ():
        return {}
    if function != TENSOR or type(arguments) is not tuple or len(arguments) < 6 or type(arguments[0]) is not Storage:
        raise Refused("the pickle calls something else than an OrderedDict without arguments or a tensor of a storage")
    # Metadata can say that the values are to be conjugated or negated.
    if arguments[6:] not in ((), (None,)):
        raise Refused("the pickle has a tensor with metadata, expected one without")
    stored, offset, shape, strides = arguments[:4]
    numbers("offset", (offset,))
    elements, steps = math.prod(numbers("sizes", shape)), list(zip(shape, numbers("strides", strides)))
    if len(shape) != len(strides):
        raise Refused(f"an array's strides are {list(strides)}, expected one for each of the sizes {list(shape)}")
    if any(size > 1 and stride == 0 for size, stride in steps):
        raise Refused(f"an array's strides are {list(strides)}, expected no repeated elements")
    if elements > stored.elements or elements and offset + span(shape, strides) > stored.elements:
        raise Refused(f"an array has the sizes {list(shape)} and strides {list(strides)} at {offset}, expected one within the {stored.elements} elements stored")
    return Array(stored.dtype, stored.at + (offset if elements else 0) * WIDTH[stored.dtype], shape, strides)


def storage(parts, place):
    """The storage of a persistent id: ("storage", type, key, location, elements)."""
    kinds = (str, Name, str, str, int)
    if type(parts) is not tuple or tuple(map(type, parts)) != kinds or parts[0] != "storage" or parts[1].name.split()[1] not in STORAGES:
        raise Refused('the pickle has another persistent id than ("storage", type, key, location, elements)')
    dtype, key, elements = STORAGES[parts[1].name.split()[1]], parts[2], parts[4]
    if place(key) is None:
        raise Refused(f"the archive holds no {'data/' + key!a}")
    at, found = place(key)
    if found != elements * WIDTH[dtype]:
        raise Refused(f"a storage has {found} bytes, expected {elements} elements of {WIDTH[dtype]} bytes")
    return Storage(dtype, at, elements)


def span(shape, strides):
    """The span of elements of a non-empty array, from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))


def named(root, limit):
    """The arrays of a value by their paths. `limit` bounds how many values are visited, because values may be nested repeatedly."""
    found, left, left_of_names = {}, limit, MAX_HEADER

    def visit(value, path):
        nonlocal left, left_of_names
        left -= 1
        if left < 0 or len(path) > MAX_DEPTH:
            raise Refused(f"values hold each other more than {MAX_DEPTH} deep, or more often than the file has bytes")
        if type(value) in (list, tuple) and value and all(type(item) is int for item in value) or value == [] and type(value) is list:
            left -= len(value)
            value = ("I64", array.array("q", value).tobytes(), (len(value),))
        elif type(value) in (list, tuple):
            for number, item in enumerate(value):
                visit(item, (*path, str(number)))
            return
        elif type(value) is dict:
            for key, item in value.items():
                visit(item, (*path, str(key)))
            return
        elif type(value) in (bool, int, float):
            kind, form = {bool: ("BOOL", "<?"), int: ("I64", "<q"), float: ("F64", "<d")}[type(value)]
            value = (kind, struct.pack(form, value), ())
        elif type(value) is not Array:
            return
        name = ".".join(path) or "array"
        left_of_names -= len(name)
        if left_of_names < 0:
            raise Refused(f"the names of the arrays take more than {MAX_HEADER} bytes")
        if name in found or name == "__metadata__":
            raise Refused(f"two arrays are called {name[:60]!a}, or one as safetensors calls its metadata")
        found[name] = value

    visit(root, ())
    return found


def write(out, source, arrays):
    """Writes a safetensors file under another name and renames it."""
    header, offset = {}, 0
    for name, value in arrays.items():
        dtype, shape = value[0], value[2]
        end = offset + math.prod(shape) * WIDTH[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, end)}
        offset = end
    # Tensors may share bytes; those of one file are written at most twice.
    if offset > 2 * source.length + (1 << 20):
        raise Refused(f"the arrays would take {offset} bytes, more than twice the file")
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refused("an array's name is not Unicode") from None
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise Refused(f"the header would take {len(text)} bytes, expected at most {MAX_HEADER}")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    with open(temporary, "xb") as file:
        try:
            file.write(struct.pack("<Q", len(text)) + text)
            for value in arrays.values():
                file.write(elements_of(source, value) if type(value) is Array else value[1])
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, out)
        except BaseException:
            os.unlink(temporary)
            raise


def elements_of(source, value):
    """The bytes of an array in row-major order."""
    if 0 in value.shape:
        return b""
    width, run, steps = WIDTH[value.dtype], 1, list(zip(value.shape, value.strides))
    data = memoryview(source.read("an array", value.at, span(value.shape, value.strides) * width))
    # Contiguous trailing dimensions are copied as one.
    while steps and (steps[-1][0] == 1 or steps[-1][1] == run):
        run *= steps.pop()[0]
    places = (sum(at * stride for at, (_, stride) in zip(index, steps)) for index in itertools.product(*(range(size) for size, _ in steps)))
    return b"".join(data[at * width : (at + run) * width] for at in places)


if __name__ == "__main__":
    main()
