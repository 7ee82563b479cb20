"""The code of the CUDA kernels, read out of the built library: nothing in it may round otherwise than the CPU."""
import importlib.util
import os
import re
import shutil
import subprocess
import unittest

FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f64"}
APPROXIMATE = {"rsqrt", "sin", "cos", "ex2", "lg2", "tanh"}
INSTRUCTION = re.compile(r"^[\s{]*(?:@!?%p\d+\s+)?([a-z][a-z0-9_]*(?:\.[a-z0-9_:]+)*)\s+([^;]*);", re.MULTILINE)
BEGIN = re.compile(rb"\.version [\d.]+\s+\.target sm_\w+")


# The rule whose terms are rounded once, by one operation that multiplies and adds. Its kernels have no other sum of floats, so
# nothing there can be contracted.
FUSES = "ProductRule"
FUSED = {"fma.rn.f64"}


def entries(ptx):
    """The kernels by name."""
    return {entry.split("(")[0].strip(): entry for entry in ptx.split(".entry ")[1:]}


def wrong_with(instruction):
    """Why an instruction may give other bits than the CPU's IEEE operation, or None."""
    name, *parts = instruction.split(".")
    floating = bool(FLOATS.intersection(parts))
    if floating and name in ("fma", "mad"):
        return "contracts a product and a sum"
    if floating and name in ("add", "sub", "mul") and "rn" not in parts:
        return "may be contracted by the assembler, since it has no .rn"
    if "ftz" in parts:
        return "flushes denormals"
    if name in APPROXIMATE or {"approx", "full"}.intersection(parts):
        return "is approximate"
    if name in ("div", "sqrt", "rcp") and floating and "rn" not in parts:
        return "does not round to nearest"
    if floating and {"rz", "rm", "rp", "rzi", "rmi", "rpi"}.intersection(parts):
        return "rounds in another direction"
    if floating and "sat" in parts:
        return "saturates"
    return None


def violations(ptx):
    """Of kernels, and of the functions before the first one."""
    found = []
    for kernel, code in {"": ptx.split(".entry ")[0], **entries(ptx)}.items():
        for name, _ in INSTRUCTION.findall(code):
            if FUSES in kernel and name in FUSED:
                continue
            if FUSES in kernel and name.split(".")[0] in ("add", "sub") and FLOATS.intersection(name.split(".")):
                found.append(f"{name}: rounds a term twice")
            if wrong_with(name):
                found.append(f"{name}: {wrong_with(name)}")
    return found


def narrow_uses_of_blocks(ptx):
    """Instructions of 32 bits that compute with the number of a block, which has to be widened first."""
    found = []
    for entry in ptx.split(".entry ")[1:]:
        blocks = re.findall(r"mov\.u32\s+(%r\d+), %ctaid\.x;", entry)
        for name, operands in INSTRUCTION.findall(entry):
            sources = re.split(r"[\s,\[\]+]+", operands)[1:]
            widens = name in ("mul.wide.u32", "mad.wide.u32", "cvt.u64.u32", "mov.u32")
            if not widens and any(block in sources for block in blocks):
                found.append(f"{name} {operands}")
    return found


MACHINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")


def machine_code_wrong_with(kernel, name, operands):
    """The same of an instruction of a GPU, in a kernel that neither divides nor takes roots: those are made of such steps."""
    if FUSES in kernel and name.split(".")[0] == "DFMA":
        return None
    if name.startswith("HFMA2") and re.match(r"\s*\w+, -RZ, RZ, ", operands):
        return None  # loads a constant
    if name.split(".")[0] in ("FFMA", "DFMA", "HFMA2", "FFMA32I"):
        return "contracts a product and a sum"
    if name.split(".")[0] == "MUFU":
        return "is approximate"
    if "FTZ" in name.split("."):
        return "flushes denormals"
    return None


def kernels_that_divide(ptx):
    return {kernel for kernel, code in entries(ptx).items() if re.search(r"\b(div|sqrt|rcp)\.", code)}


def machine_code_violations(code, dividing):
    """Of a disassembly. Also the names of all instructions of the kernels that are judged, and of the others."""
    found, judged, others = [], set(), set()
    parts = re.split(r"Function : (\S+)", code)
    for kernel, body in zip(parts[1::2], parts[2::2]):
        for name, operands in MACHINE.findall(body):
            (others if kernel in dividing else judged).add(name.split(".")[0])
            wrong = machine_code_wrong_with(kernel, name, operands)
            if kernel not in dividing and wrong:
                found.append(f"{kernel}: {name}{operands}: {wrong}")
    return found, judged, others


def disassembler():
    """On the PATH, or Triton's own."""
    triton = importlib.util.find_spec("triton")
    own = os.path.join(os.path.dirname(triton.origin), "backends", "nvidia", "bin", "cuobjdump") if triton else ""
    return shutil.which("cuobjdump") or (own if os.path.exists(own) else None)


LIBRARY = os.path.join(os.environ["SHARDPROOF_BUILD"], "libshardproof_cuda.so")


def built_ptx():
    with open(LIBRARY, "rb") as file:
        library = file.read()
    return [library[match.start():library.index(b"\0", match.start())].decode() for match in BEGIN.finditer(library)]


class KernelsPtx(unittest.TestCase):
    def setUp(self):
        self.ptx = built_ptx()
        if not self.ptx:
            self.skipTest("this build has no CUDA kernels: CMake found no nvcc, or SHARDPROOF_CUDA was off")

    def test_the_kernels_are_there_with_the_arithmetic_that_is_judged(self):
        for ptx in self.ptx:
            self.assertGreater(ptx.count(".entry "), 100)
            names = {name for name, _ in INSTRUCTION.findall(ptx)}
            self.assertLessEqual({"add.rn.f32", "add.rn.f64", "sub.rn.f32", "mul.rn.f32", "mul.rn.f64", "div.rn.f32",
                                  "div.rn.f64", "sqrt.rn.f32", "sqrt.rn.f64", "cvt.rn.f16.f32", "cvt.f32.f16",
                                  "cvt.rni.s64.f64"}, names)

    def test_nothing_contracts_approximates_flushes_or_rounds_elsewhere(self):
        for ptx in self.ptx:
            self.assertEqual(violations(ptx), [])

    def test_terms_of_exact_products_are_rounded_once(self):
        for ptx in self.ptx:
            products = [code for kernel, code in entries(ptx).items() if FUSES in kernel]
            self.assertGreaterEqual(len(products), 2)  # with a look at each term, and without
            for code in products:
                self.assertLessEqual(FUSED, {name for name, _ in INSTRUCTION.findall(code)})

    def test_numbers_of_blocks_are_widened_before_anything_is_computed_with_them(self):
        for ptx in self.ptx:
            self.assertGreater(ptx.count("%ctaid.x"), 100)
            self.assertEqual(narrow_uses_of_blocks(ptx), [])

    def test_the_machine_code_of_kernels_that_do_not_divide_contracts_and_flushes_nothing(self):
        tool = disassembler()
        if not tool:
            self.skipTest("there is no cuobjdump on the PATH and no Triton that brings one")
        command = [tool, "-sass", LIBRARY]
        code = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout
        found, judged, others = machine_code_violations(code, kernels_that_divide(self.ptx[-1]))
        self.assertEqual(found, [])
        self.assertLessEqual({"FADD", "FMUL", "DADD", "DMUL"}, judged)
        self.assertIn("FFMA", others)

    def test_each_kind_of_violation_would_be_found(self):
        for instruction, why in (
                ("fma.rn.f32", "contracts"), ("mad.f32", "contracts"), ("mul.f32", "no .rn"), ("add.f16x2", "no .rn"),
                ("div.approx.f32", "approximate"), ("div.full.f32", "approximate"), ("sqrt.approx.f32", "approximate"),
                ("rsqrt.approx.f32", "approximate"), ("add.rn.ftz.f32", "flushes"), ("sqrt.rz.f32", "nearest"),
                ("cvt.rz.f16.f32", "direction"), ("cvt.rzi.s64.f64", "direction"), ("add.rn.sat.f32", "saturates")):
            self.assertRegex(" ".join(violations(f"\t{instruction} \t%f1, %f2, %f3;\n")), why)
        for instruction in ("mad.lo.s32", "add.s64", "mul.rn.f32", "cvt.f32.f16", "setp.nan.f32", "mul.wide.u32"):
            self.assertEqual(violations(f"{{  {instruction} %r1, %r2, %r3;}}\n"), [])
        product = ".entry a11ProductRule(\n\t{} \t%fd1, %fd2, %fd3;\n"
        self.assertEqual(violations(product.format("fma.rn.f64")), [])
        for instruction, why in (("sub.rn.f64", "twice"), ("add.rn.f64", "twice"), ("fma.rz.f64", "contracts")):
            self.assertRegex(" ".join(violations(product.format(instruction))), why)
        self.assertRegex(" ".join(violations(product.format("fma.rn.f64").replace("Product", "Norm"))), "contracts")
        fused = "Function : a11ProductRule\n/*0100*/ DFMA R0, R1, R2, R3 ;\n"
        self.assertEqual(machine_code_violations(fused, set())[0], [])
        code = "Function : k\n/*0100*/ @!P0 {} ;\n"
        for instruction, why in (("FFMA R0, R1, R2, R3", "contracts"), ("HFMA2.MMA R0, R1, R2, R3", "contracts"),
                                 ("DFMA R0, R1, R2, R3", "contracts"), ("MUFU.RCP R0, R1", "approximate"),
                                 ("FADD.FTZ R0, R1, R2", "flushes")):
            self.assertRegex(" ".join(machine_code_violations(code.format(instruction), set())[0]), why)
            self.assertEqual(machine_code_violations(code.format(instruction), {"k"})[0], [])
        for instruction in ("FADD R0, R1, R2", "HFMA2.MMA R0, -RZ, RZ, 0, 1", "IMAD R0, R1, R2, R3"):
            self.assertEqual(machine_code_violations(code.format(instruction), set())[0], [])
        narrow = ".entry k(\n\tmov.u32 \t%r1, %ctaid.x;\n\tshl.b32 \t%r2, %r1, 8;\n\tmul.wide.u32 \t%rd1, %r1, 256;\n"
        self.assertEqual(narrow_uses_of_blocks(narrow), ["shl.b32 %r2, %r1, 8"])


if __name__ == "__main__":
    unittest.main()
