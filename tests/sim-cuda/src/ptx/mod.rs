//! A subset of PTX: loads and stores of global memory, arithmetic, branches.
//!
//! Programs bring their own kernels, and the accesses of kernels are under test. Threads run one after the other,
//! so instructions by which threads communicate are rejected when the text is parsed. The language is that of
//! NVIDIA's "Parallel Thread Execution ISA".

mod parse;
mod run;

/// The memory that a thread accesses.
pub(crate) trait Memory {
    /// The error of an access.
    type Error;

    /// Loads 1, 2, 4 or 8 bytes.
    fn load(&mut self, address: u64, len: u64) -> Result<u64, Self::Error>;

    /// Stores the lowest 1, 2, 4 or 8 bytes of a value.
    fn store(&mut self, address: u64, len: u64, value: u64) -> Result<(), Self::Error>;
}

/// The dimensions of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    pub(crate) blocks: [u32; 3],
    pub(crate) threads: [u32; 3],
}

/// The kernels of a module.
#[derive(Debug)]
pub(crate) struct Program {
    /// The version of PTX; zeros without one.
    version: (u32, u32),
    entries: Vec<Entry>,
}

/// The place of a parameter among all parameters of a kernel, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parameter {
    pub(crate) offset: usize,
    pub(crate) len: usize,
}

#[derive(Debug)]
struct Entry {
    name: String,
    parameters: Vec<Parameter>,
    registers: usize,
    code: Vec<Instruction>,
}

impl Program {
    /// Returns whether a driver accepts the version of the text: CUDA 11.0 came with PTX 7.0, 12.0 with 8.0, and 13.0 with 9.0 ("Release
    /// Notes" of the PTX ISA manual).
    pub(crate) fn is_known_to(&self, driver_version: i32) -> bool {
        let newest = (driver_version / 1000 - 4, driver_version % 1000 / 10);
        (i64::from(self.version.0), i64::from(self.version.1)) <= (newest.0.into(), newest.1.into())
    }

    /// Returns the index of the kernel with this name.
    pub(crate) fn entry(&self, name: &str) -> Option<usize> {
        self.entries.iter().position(|entry| entry.name == name)
    }

    /// Returns the places of the parameters.
    pub(crate) fn parameters(&self, entry: usize) -> impl Iterator<Item = Parameter> + '_ {
        self.entries[entry].parameters.iter().copied()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Bits,
    Unsigned,
    Signed,
    Float,
    Predicate,
}

/// A type such as `.u32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Type {
    class: Class,
    bytes: u64,
}

impl Type {
    fn bits(self) -> u32 {
        8 * self.bytes as u32
    }

    /// Truncates a value to the width of the type.
    fn cut(self, value: u64) -> u64 {
        if self.bytes >= 8 { value } else { value & ((1 << self.bits()) - 1) }
    }

    /// Converts a value to a signed number.
    fn signed(self, value: u64) -> i64 {
        let unused = 64 - self.bits();
        (value << unused).cast_signed() >> unused
    }

    fn is_signed(self) -> bool {
        self.class == Class::Signed
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Special {
    Thread(usize),
    Threads(usize),
    Block(usize),
    Blocks(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operand {
    Register(usize),
    Immediate(u64),
    Special(Special),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Binary {
    Add,
    Subtract,
    Multiply,
    MultiplyHigh,
    MultiplyWide,
    Divide,
    Remainder,
    Minimum,
    Maximum,
    And,
    Or,
    Xor,
    ShiftLeft,
    ShiftRight,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unary {
    Move,
    Not,
    Negate,
    Absolute,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Parameter { to: usize, base: Operand, offset: i64, kind: Type },
    Load { to: usize, base: Operand, offset: i64, kind: Type },
    Store { base: Operand, offset: i64, from: Operand, kind: Type },
    Unary { what: Unary, to: usize, from: Operand, kind: Type },
    Binary { what: Binary, to: usize, left: Operand, right: Operand, kind: Type },
    MultiplyAdd { wide: bool, to: usize, left: Operand, right: Operand, plus: Operand, kind: Type },
    Convert { to: usize, from: Operand, target: Type, source: Type },
    Compare { how: Comparison, to: usize, left: Operand, right: Operand, kind: Type },
    Select { to: usize, left: Operand, right: Operand, by: Operand, kind: Type },
    Branch { to: usize },
    Nothing,
    Return,
}

#[derive(Debug, Clone, Copy)]
struct Instruction {
    /// The predicate register of the instruction, and whether it must be false.
    guard: Option<(usize, bool)>,
    action: Action,
}
