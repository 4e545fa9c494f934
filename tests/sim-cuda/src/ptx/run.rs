//! The interpreter.

use super::{
    Action, Binary, Class, Comparison, Entry, Grid, Instruction, Memory, Operand, Program, Special, Type,
    Unary,
};

/// The position of a thread.
#[derive(Clone, Copy)]
struct ThreadPosition {
    grid: Grid,
    block: [u32; 3],
    thread: [u32; 3],
}

impl Program {
    /// Runs every thread of a kernel.
    ///
    /// # Errors
    /// The first failed access.
    pub(crate) fn run<M: Memory>(
        &self,
        entry: usize,
        parameters: &[u8],
        grid: Grid,
        memory: &mut M,
    ) -> Result<(), M::Error> {
        let entry = &self.entries[entry];
        let mut registers = vec![0; entry.registers];
        for block in positions(grid.blocks) {
            for thread in positions(grid.threads) {
                registers.fill(0);
                entry.run(&mut registers, parameters, ThreadPosition { grid, block, thread }, memory)?;
            }
        }
        Ok(())
    }
}

fn positions(sizes: [u32; 3]) -> impl Iterator<Item = [u32; 3]> {
    let [x, y, z] = sizes;
    (0..z).flat_map(move |z| (0..y).flat_map(move |y| (0..x).map(move |x| [x, y, z])))
}

impl Entry {
    fn run<M: Memory>(
        &self,
        registers: &mut [u64],
        parameters: &[u8],
        place: ThreadPosition,
        memory: &mut M,
    ) -> Result<(), M::Error> {
        let mut next = 0;
        while let Some(Instruction { guard, action }) = self.code.get(next) {
            next += 1;
            if guard.is_some_and(|(predicate, negated)| (registers[predicate] != 0) == negated) {
                continue;
            }
            let value = |operand: Operand| match operand {
                Operand::Register(register) => registers[register],
                Operand::Immediate(value) => value,
                Operand::Special(special) => place.value(special),
            };
            let (to, result) = match *action {
                Action::Return => return Ok(()),
                Action::Nothing => continue,
                Action::Branch { to } => {
                    next = to;
                    continue;
                }
                Action::Store { base, offset, from, kind } => {
                    let address = value(base).wrapping_add_signed(offset);
                    memory.store(address, kind.bytes, kind.cut(value(from)))?;
                    continue;
                }
                Action::Load { to, base, offset, kind } => {
                    let loaded = memory.load(value(base).wrapping_add_signed(offset), kind.bytes)?;
                    (to, if kind.is_signed() { kind.signed(loaded).cast_unsigned() } else { loaded })
                }
                Action::Parameter { to, base, offset, kind } => {
                    let at = value(base).wrapping_add_signed(offset) as usize;
                    let mut word = [0; 8];
                    let bytes = parameters.iter().skip(at).take(kind.bytes as usize);
                    word.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
                    (to, u64::from_le_bytes(word))
                }
                Action::Unary { what, to, from, kind } => (to, unary(what, value(from), kind)),
                Action::Binary { what, to, left, right, kind } => {
                    (to, binary(what, value(left), value(right), kind))
                }
                Action::MultiplyAdd { wide, to, left, right, plus, kind } => {
                    (to, multiply_add(wide, value(left), value(right), value(plus), kind))
                }
                Action::Convert { to, from, target, source } => (to, convert(value(from), target, source)),
                Action::Compare { how, to, left, right, kind } => {
                    (to, u64::from(compare(how, value(left), value(right), kind)))
                }
                Action::Select { to, left, right, by, kind } => {
                    (to, kind.cut(value(if value(by) != 0 { left } else { right })))
                }
            };
            registers[to] = result;
        }
        Ok(())
    }
}

impl ThreadPosition {
    fn value(&self, special: Special) -> u64 {
        u64::from(match special {
            Special::Thread(axis) => self.thread[axis],
            Special::Threads(axis) => self.grid.threads[axis],
            Special::Block(axis) => self.block[axis],
            Special::Blocks(axis) => self.grid.blocks[axis],
        })
    }
}

fn float(value: u64, kind: Type) -> f64 {
    if kind.bytes == 4 { f64::from(f32::from_bits(value as u32)) } else { f64::from_bits(value) }
}

/// Rounds once: the sum, difference, product or quotient of two `f32` is exact enough in `f64` for that.
fn bits_of(value: f64, kind: Type) -> u64 {
    if kind.bytes == 4 { u64::from((value as f32).to_bits()) } else { value.to_bits() }
}

fn unary(what: Unary, value: u64, kind: Type) -> u64 {
    match what {
        Unary::Move => kind.cut(value),
        Unary::Not if kind.class == Class::Predicate => u64::from(value == 0),
        Unary::Not => kind.cut(!value),
        Unary::Negate if kind.class == Class::Float => bits_of(-float(value, kind), kind),
        Unary::Negate => kind.cut(value.wrapping_neg()),
        Unary::Absolute if kind.class == Class::Float => bits_of(float(value, kind).abs(), kind),
        Unary::Absolute => kind.cut(kind.signed(value).wrapping_abs().cast_unsigned()),
    }
}

fn binary(what: Binary, left: u64, right: u64, kind: Type) -> u64 {
    if kind.class == Class::Float {
        return bits_of(float_binary(what, float(left, kind), float(right, kind)), kind);
    }
    if kind.class == Class::Predicate {
        return logic(what, left, right) & 1;
    }
    let (left, right) = (kind.cut(left), kind.cut(right));
    let (a, b) = (kind.signed(left), kind.signed(right));
    let result = match what {
        Binary::Add => left.wrapping_add(right),
        Binary::Subtract => left.wrapping_sub(right),
        Binary::Multiply => left.wrapping_mul(right),
        // The product is twice as wide as the operands of 16 or 32 bits.
        Binary::MultiplyWide if kind.is_signed() => return a.wrapping_mul(b).cast_unsigned(),
        Binary::MultiplyWide => return left.wrapping_mul(right),
        Binary::MultiplyHigh if kind.is_signed() => {
            (i128::from(a).wrapping_mul(i128::from(b)) >> kind.bits()) as u64
        }
        Binary::MultiplyHigh => (u128::from(left).wrapping_mul(u128::from(right)) >> kind.bits()) as u64,
        // The result of a division by zero is unspecified; on hardware it is mostly all ones.
        Binary::Divide if right == 0 => u64::MAX,
        Binary::Divide if kind.is_signed() => a.wrapping_div(b).cast_unsigned(),
        Binary::Divide => left / right,
        Binary::Remainder if right == 0 => left,
        Binary::Remainder if kind.is_signed() => a.wrapping_rem(b).cast_unsigned(),
        Binary::Remainder => left % right,
        Binary::Minimum if kind.is_signed() => a.min(b).cast_unsigned(),
        Binary::Minimum => left.min(right),
        Binary::Maximum if kind.is_signed() => a.max(b).cast_unsigned(),
        Binary::Maximum => left.max(right),
        Binary::And | Binary::Or | Binary::Xor => logic(what, left, right),
        Binary::ShiftLeft => u32::try_from(right).ok().and_then(|by| left.checked_shl(by)).unwrap_or(0),
        Binary::ShiftRight => {
            let by = right.min(63) as u32;
            if kind.is_signed() {
                (a >> by).cast_unsigned()
            } else {
                u32::try_from(right).ok().and_then(|by| left.checked_shr(by)).unwrap_or(0)
            }
        }
    };
    kind.cut(result)
}

fn logic(what: Binary, left: u64, right: u64) -> u64 {
    match what {
        Binary::And => left & right,
        Binary::Or => left | right,
        _ => left ^ right,
    }
}

fn float_binary(what: Binary, left: f64, right: f64) -> f64 {
    match what {
        Binary::Add => left + right,
        Binary::Subtract => left - right,
        Binary::Divide => left / right,
        Binary::Minimum => left.min(right),
        Binary::Maximum => left.max(right),
        _ => left * right,
    }
}

fn multiply_add(wide: bool, left: u64, right: u64, plus: u64, kind: Type) -> u64 {
    if kind.class == Class::Float {
        return if kind.bytes == 4 {
            let [left, right, plus] = [left, right, plus].map(|value| f32::from_bits(value as u32));
            u64::from(left.mul_add(right, plus).to_bits())
        } else {
            let [left, right, plus] = [left, right, plus].map(f64::from_bits);
            left.mul_add(right, plus).to_bits()
        };
    }
    if wide {
        return binary(Binary::MultiplyWide, left, right, kind).wrapping_add(plus);
    }
    kind.cut(left.wrapping_mul(right).wrapping_add(plus))
}

fn convert(value: u64, target: Type, source: Type) -> u64 {
    match (target.class == Class::Float, source.class == Class::Float) {
        (true, true) => bits_of(float(value, source), target),
        (true, false) if source.is_signed() => bits_of(source.signed(value) as f64, target),
        (true, false) => bits_of(source.cut(value) as f64, target),
        // Towards zero, and to the nearest representable number.
        (false, true) if target.is_signed() => target.cut((float(value, source) as i64).cast_unsigned()),
        (false, true) => target.cut(float(value, source) as u64),
        (false, false) if source.is_signed() => target.cut(source.signed(value).cast_unsigned()),
        (false, false) => target.cut(source.cut(value)),
    }
}

fn compare(how: Comparison, left: u64, right: u64, kind: Type) -> bool {
    use std::cmp::Ordering;
    let ordering = match kind.class {
        Class::Float => float(left, kind).partial_cmp(&float(right, kind)),
        Class::Signed => Some(kind.signed(left).cmp(&kind.signed(right))),
        _ => Some(kind.cut(left).cmp(&kind.cut(right))),
    };
    let Some(ordering) = ordering else { return false };
    match how {
        Comparison::Equal => ordering == Ordering::Equal,
        Comparison::NotEqual => ordering != Ordering::Equal,
        Comparison::Less => ordering == Ordering::Less,
        Comparison::LessOrEqual => ordering != Ordering::Greater,
        Comparison::Greater => ordering == Ordering::Greater,
        Comparison::GreaterOrEqual => ordering != Ordering::Less,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Bytes(Vec<u8>);

    impl Memory for Bytes {
        type Error = u64;

        fn load(&mut self, address: u64, len: u64) -> Result<u64, u64> {
            let bytes = self.0.get(address as usize..(address + len) as usize).ok_or(address)?;
            Ok(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
        }

        fn store(&mut self, address: u64, len: u64, value: u64) -> Result<(), u64> {
            let bytes = self.0.get_mut(address as usize..(address + len) as usize).ok_or(address)?;
            bytes.copy_from_slice(&value.to_le_bytes()[..len as usize]);
            Ok(())
        }
    }

    fn kernel(body: &str) -> Program {
        let text = format!(
            ".version 6.0\n.visible .entry test(\n.param .u64 out, .param .f32 value\n)\n{{ // comment {{\n{body}\n}}"
        );
        Program::parse(&text).expect("the module is valid")
    }

    /// The bytes of the parameters `out` and `value`.
    fn parameters(out: u64) -> Vec<u8> {
        [&out.to_le_bytes()[..], &1.5_f32.to_le_bytes()].concat()
    }

    fn once(body: &str) -> u64 {
        let program =
            kernel(&format!("ld.param.u64 %rd1, [out];\n{body}\nst.global.u64 [%rd1+8], %rd9;\nret;"));
        let mut memory = Bytes(vec![0; 16]);
        let grid = Grid { blocks: [1; 3], threads: [1; 3] };
        program.run(0, &parameters(0), grid, &mut memory).expect("in bounds");
        memory.load(8, 8).expect("in bounds")
    }

    #[test]
    fn arithmetic_follows_types() {
        assert_eq!(once("mov.u32 %r1, -1; cvt.u64.u32 %rd9, %r1;"), 0xffff_ffff);
        assert_eq!(once("mov.u32 %r1, -1; cvt.s64.s32 %rd9, %r1;"), u64::MAX);
        assert_eq!(once("mov.u32 %r1, 0x80000000; mul.wide.u32 %rd9, %r1, 4;"), 0x2_0000_0000);
        assert_eq!(once("mov.s32 %r1, -3; mul.wide.s32 %rd9, %r1, 4;"), (-12_i64).cast_unsigned());
        assert_eq!(once("mov.u64 %rd2, 7; mad.lo.u64 %rd9, %rd2, 6, 3;"), 45);
        assert_eq!(once("mov.u64 %rd2, 1; shl.b64 %rd9, %rd2, 64;"), 0);
        assert_eq!(once("mov.s64 %rd2, -8; shr.s64 %rd9, %rd2, 1;"), (-4_i64).cast_unsigned());
        assert_eq!(once("setp.lt.s32 %p1, -1, 0; selp.u64 %rd9, 5, 6, %p1;"), 5);
        assert_eq!(once("setp.lt.u32 %p1, -1, 0; selp.u64 %rd9, 5, 6, %p1;"), 6);
        let float = "ld.param.f32 %f1, [value]; add.rn.f32 %f1, %f1, 0f3F800000; cvt.rzi.u64.f32 %rd9, %f1;";
        assert_eq!(once(float), 2);
    }

    #[test]
    fn elements_of_an_array_are_read_by_their_offsets() {
        let text = ".entry test(.param .u8 small, .param .align 8 .b8 table[24], .param .u64 out) {
            mov.b64 %rd1, table; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 8; add.s64 %rd1, %rd1, %rd2;
            ld.param.u64 %rd3, [%rd1]; ld.param.u64 %rd4, [table+16]; ld.param.u64 %rd5, [out];
            add.s64 %rd6, %rd3, %rd4; add.s64 %rd7, %rd5, %rd2; st.global.u64 [%rd7], %rd6; }";
        let program = Program::parse(text).expect("the module is valid");
        let words = [7_u64, 10, 20, 100, 0];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut memory = Bytes(vec![0; 16]);
        let grid = Grid { blocks: [1; 3], threads: [2, 1, 1] };
        program.run(0, &bytes, grid, &mut memory).expect("in bounds");
        assert_eq!((memory.load(0, 8), memory.load(8, 8)), (Ok(110), Ok(120)));
    }

    #[test]
    fn branches_and_guards_run_in_every_thread() {
        let program = kernel(
            "ld.param.u64 %rd1, [out]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
             mad.lo.u32 %r4, %r1, %r2, %r3; cvt.u64.u32 %rd2, %r4; add.u64 %rd3, %rd1, %rd2;
             mov.u32 %r5, 0;
             $again: add.u32 %r5, %r5, 1; setp.le.u32 %p1, %r5, %r4; @%p1 bra $again;
             @!%p1 st.global.u8 [%rd3], %r5;
             $end:",
        );
        let mut memory = Bytes(vec![0; 6]);
        let grid = Grid { blocks: [2, 1, 1], threads: [3, 1, 1] };
        assert_eq!(program.run(0, &parameters(0), grid, &mut memory), Ok(()));
        assert_eq!(memory.0, [1, 2, 3, 4, 5, 6]);
        assert_eq!(program.run(0, &parameters(1), grid, &mut memory), Err(6), "the first access that fails");
    }

    #[test]
    fn unsupported_instructions_are_rejected_by_parser() {
        let refused = |body: &str| {
            let text = format!(".entry test(.param .u64 out) {{ {body} }}");
            Program::parse(&text).expect_err(body)
        };
        for body in [
            "atom.global.add.u32 %r1, [%rd1], 1;",
            "bar.sync 0;",
            "ld.shared.u32 %r1, [%rd1];",
            "bra $nowhere;",
        ] {
            assert!(refused(body).contains("not supported"), "{body}");
        }
        assert!(
            Program::parse(".entry test(.param .b8 big[16]) { ret; }").is_err(),
            "an array without an alignment"
        );
        assert!(Program::parse(".entry test(").is_err());
    }

    #[test]
    fn parameters_have_a_limit_of_the_version_and_the_target() {
        for (version, target, limit) in
            [("6.0", 90, 4352), ("8.0", 90, 4352), ("8.1", 61, 4352), ("8.1", 70, 32_764)]
        {
            let parsed = |bytes: usize| {
                let head = format!(".version {version}\n.target sm_{target}\n");
                let one = format!(".entry test(.param .align 4 .b8 table[{}], .param .u32 one)", bytes - 4);
                Program::parse(&format!("{head}{one} {{ ret; }}"))
            };
            assert!(parsed(limit).is_ok(), "PTX {version} for sm_{target}");
            assert!(parsed(limit + 4).is_err(), "PTX {version} for sm_{target}");
        }
    }
}
