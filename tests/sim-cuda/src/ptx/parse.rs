//! The parser.

use std::collections::HashMap;

use super::{
    Action, Binary, Class, Comparison, Entry, Instruction, Operand, Parameter, Program, Special, Type, Unary,
};

type Parsed<T> = Result<T, String>;

/// The maximum size of the parameters of a kernel ("Kernel Function Parameters" of the PTX ISA manual), since PTX 8.1 on devices from
/// compute capability 7.0 on.
const PARAMETER_BYTES: usize = 32_764;
/// The same before.
const FORMER_PARAMETER_BYTES: usize = 4352;

impl Program {
    /// Parses a module.
    ///
    /// # Errors
    /// The unsupported part of the text.
    pub(crate) fn parse(text: &str) -> Parsed<Self> {
        let text = without_comments(text);
        let version = directive(&text, ".version ").and_then(version).unwrap_or_default();
        let target = directive(&text, ".target sm_").and_then(|target| target.parse().ok()).unwrap_or(0);
        let limit = if version >= (8, 1) && target >= 70 { PARAMETER_BYTES } else { FORMER_PARAMETER_BYTES };
        let mut rest = text.as_str();
        let mut entries = Vec::new();
        while let Some(at) = rest.find(".entry") {
            rest = &rest[at + ".entry".len()..];
            let body = rest.find('{').ok_or("has an entry without a body")?;
            let end = rest.find('}').filter(|end| *end > body).ok_or("has a body without a closing brace")?;
            let entry = entry(&rest[..body], &rest[body + 1..end])?;
            let bytes = entry.parameters.last().map_or(0, |last| last.offset + last.len);
            if bytes > limit {
                return Err(format!("has an entry with {bytes} B of parameters; the limit is {limit} B"));
            }
            entries.push(entry);
            rest = &rest[end + 1..];
        }
        Ok(Self { version, entries })
    }
}

/// Returns the rest of the line that begins with a directive.
fn directive<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.trim_start().strip_prefix(name)).map(str::trim)
}

fn version(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('/') {
        out.push_str(&rest[..at]);
        let (skipped, kept) = match rest.as_bytes().get(at + 1) {
            Some(b'/') => (rest[at..].find('\n').unwrap_or(rest.len() - at), "\n"),
            Some(b'*') => (rest[at..].find("*/").map_or(rest.len() - at, |end| end + 2), " "),
            _ => (1, "/"),
        };
        out.push_str(kept);
        rest = &rest[at + skipped..];
    }
    out.push_str(rest);
    out
}

fn entry(head: &str, body: &str) -> Parsed<Entry> {
    if body.contains('{') {
        return Err("has a block or a vector inside of a body, which is not supported".into());
    }
    let name = head.split('(').next().unwrap_or_default().trim().to_owned();
    let list = head.split_once('(').and_then(|(_, list)| list.rsplit_once(')')).map_or("", |(list, _)| list);
    let mut reader = Reader::default();
    let mut parameters = Vec::new();
    let mut end = 0_usize;
    for text in list.split(',').map(str::trim).filter(|text| !text.is_empty()) {
        let (name, len, align) =
            parameter(text).ok_or_else(|| format!("has a parameter '{text}', which is not supported"))?;
        let offset = end.next_multiple_of(align);
        end = offset + len;
        reader.parameters.insert(name.to_owned(), offset);
        parameters.push(Parameter { offset, len });
    }
    let statements = statements(body);
    let mut labels = HashMap::new();
    let mut number = 0;
    for (label, statement) in &statements {
        if let Some(label) = label {
            labels.insert(*label, number);
        }
        number += usize::from(!statement.is_empty());
    }
    reader.labels = labels;
    let written = statements.iter().filter(|(_, statement)| !statement.is_empty());
    let mut code = written.map(|(_, statement)| reader.instruction(statement)).collect::<Parsed<Vec<_>>>()?;
    code.push(Instruction { guard: None, action: Action::Return });
    Ok(Entry { name, parameters, registers: reader.registers.len(), code })
}

/// Returns the name, the length and the alignment of a parameter: of a plain type, or of an array as in
/// `.param .align 8 .b8 name[64]`.
fn parameter(text: &str) -> Option<(&str, usize, usize)> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let type_of = |word: &str| kind(word.strip_prefix('.')?).map(|kind| kind.bytes as usize);
    match words[..] {
        [".param", one, name] if !name.contains('[') => type_of(one).map(|bytes| (name, bytes, bytes)),
        [".param", ".align", align, one, array] => {
            let (name, count) = array.strip_suffix(']')?.split_once('[')?;
            Some((name, type_of(one)? * count.parse::<usize>().ok()?, align.parse().ok()?))
        }
        _ => None,
    }
}

/// Splits a body into statements without declarations, each with its label. A label at the end has an empty
/// statement.
fn statements(body: &str) -> Vec<(Option<&str>, &str)> {
    let mut found = Vec::new();
    for statement in body.split(';') {
        let mut rest = statement.trim();
        while let Some((label, after)) = rest.split_once(':') {
            // A colon elsewhere is part of an unsupported instruction, which is reported.
            if label.contains(char::is_whitespace) {
                break;
            }
            found.push((Some(label), ""));
            rest = after.trim();
        }
        if !rest.is_empty() && !rest.starts_with('.') {
            found.push((None, rest));
        }
    }
    found
}

fn kind(name: &str) -> Option<Type> {
    let (class, width) = name.split_at_checked(1)?;
    let class = match class {
        "b" => Class::Bits,
        "u" => Class::Unsigned,
        "s" => Class::Signed,
        "f" => Class::Float,
        "p" if name == "pred" => return Some(Type { class: Class::Predicate, bytes: 1 }),
        _ => return None,
    };
    let bytes = match width {
        "8" if class != Class::Float => 1,
        "16" if class != Class::Float => 2,
        "32" => 4,
        "64" => 8,
        _ => return None,
    };
    Some(Type { class, bytes })
}

/// The names that the statements of one body refer to.
#[derive(Default)]
struct Reader<'a> {
    registers: HashMap<String, usize>,
    parameters: HashMap<String, usize>,
    labels: HashMap<&'a str, usize>,
}

impl Reader<'_> {
    fn instruction(&mut self, statement: &str) -> Parsed<Instruction> {
        let unknown = || format!("has '{statement}', which is not supported");
        let (guard, rest) = match statement.strip_prefix('@') {
            None => (None, statement),
            Some(guarded) => {
                let (predicate, rest) = guarded.split_once(char::is_whitespace).ok_or_else(unknown)?;
                let name = predicate.strip_prefix('!');
                (Some((self.register(name.unwrap_or(predicate)), name.is_some())), rest.trim())
            }
        };
        let (mnemonic, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let operands: Vec<&str> = operands.split(',').map(str::trim).filter(|one| !one.is_empty()).collect();
        let parts: Vec<&str> = mnemonic.split('.').collect();
        let action = self.action(&parts, &operands).ok_or_else(unknown)?;
        Ok(Instruction { guard, action })
    }

    fn action(&mut self, parts: &[&str], operands: &[&str]) -> Option<Action> {
        let last = parts.last().and_then(|name| kind(name));
        let has = |part: &str| parts.contains(&part);
        Some(match (parts[0], operands) {
            ("ret" | "exit", []) => Action::Return,
            ("bra", [label]) => Action::Branch { to: *self.labels.get(label)? },
            // Threads that run one after the other need no ordering.
            ("membar" | "fence", []) => Action::Nothing,
            ("ld", [to, from]) if has("param") => {
                let (base, offset) = self.address(from)?;
                Action::Parameter { to: self.register(to), base, offset, kind: last? }
            }
            ("ld", [to, from]) if is_global(parts) => {
                let (base, offset) = self.address(from)?;
                Action::Load { to: self.register(to), base, offset, kind: last? }
            }
            ("st", [to, from]) if is_global(parts) => {
                let (base, offset) = self.address(to)?;
                Action::Store { base, offset, from: self.operand(from)?, kind: last? }
            }
            ("mov" | "cvta", [to, from]) => self.unary(Unary::Move, to, from, last?)?,
            ("not", [to, from]) => self.unary(Unary::Not, to, from, last?)?,
            ("neg", [to, from]) => self.unary(Unary::Negate, to, from, last?)?,
            ("abs", [to, from]) => self.unary(Unary::Absolute, to, from, last?)?,
            ("cvt", [to, from]) => {
                let target = parts.iter().rev().nth(1).and_then(|name| kind(name))?;
                let rounds_towards_zero = !(has("rni") || has("rmi") || has("rpi") || has("sat"));
                let known = target.class != Class::Float || source_is_plain(last?);
                if !rounds_towards_zero || !known {
                    return None;
                }
                Action::Convert { to: self.register(to), from: self.operand(from)?, target, source: last? }
            }
            ("setp", [to, left, right]) => {
                let how = comparison(parts.get(1)?)?;
                let (left, right) = (self.operand(left)?, self.operand(right)?);
                Action::Compare { how, to: self.register(to), left, right, kind: last? }
            }
            ("selp", [to, left, right, by]) => {
                let (left, right, by) = (self.operand(left)?, self.operand(right)?, self.operand(by)?);
                Action::Select { to: self.register(to), left, right, by, kind: last? }
            }
            ("mad" | "fma", [to, left, right, plus]) if !has("hi") && !has("sat") => {
                let (left, right, plus) = (self.operand(left)?, self.operand(right)?, self.operand(plus)?);
                Action::MultiplyAdd {
                    wide: has("wide"),
                    to: self.register(to),
                    left,
                    right,
                    plus,
                    kind: last?,
                }
            }
            (name, [to, left, right]) if !has("sat") && !has("cc") => {
                let what = binary(name, parts)?;
                let (left, right) = (self.operand(left)?, self.operand(right)?);
                Action::Binary { what, to: self.register(to), left, right, kind: last? }
            }
            _ => return None,
        })
    }

    fn unary(&mut self, what: Unary, to: &str, from: &str, kind: Type) -> Option<Action> {
        Some(Action::Unary { what, to: self.register(to), from: self.operand(from)?, kind })
    }

    fn register(&mut self, name: &str) -> usize {
        let next = self.registers.len();
        *self.registers.entry(name.to_owned()).or_insert(next)
    }

    fn operand(&mut self, text: &str) -> Option<Operand> {
        if let Some(special) = special(text) {
            return Some(Operand::Special(special));
        }
        if let Some(offset) = self.parameters.get(text) {
            return Some(Operand::Immediate(*offset as u64));
        }
        if text.starts_with('%')
            || text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
        {
            return Some(Operand::Register(self.register(text)));
        }
        immediate(text).map(Operand::Immediate)
    }

    fn address(&mut self, text: &str) -> Option<(Operand, i64)> {
        let inside = text.strip_prefix('[')?.strip_suffix(']')?;
        match inside.split_once('+') {
            None => Some((self.operand(inside.trim())?, 0)),
            Some((base, offset)) => {
                Some((self.operand(base.trim())?, immediate(offset.trim())?.cast_signed()))
            }
        }
    }
}

/// Returns whether a conversion to a float has a source type of a supported width.
fn source_is_plain(source: Type) -> bool {
    source.class != Class::Predicate && source.class != Class::Bits
}

/// Returns whether the access is to global memory, also by generic addresses.
fn is_global(parts: &[&str]) -> bool {
    !parts.iter().any(|part| matches!(*part, "shared" | "local" | "const" | "v2" | "v4"))
}

fn special(text: &str) -> Option<Special> {
    let (name, axis) = text.split_once('.')?;
    let axis = ["x", "y", "z"].iter().position(|known| *known == axis)?;
    Some(match name {
        "%tid" => Special::Thread(axis),
        "%ntid" => Special::Threads(axis),
        "%ctaid" => Special::Block(axis),
        "%nctaid" => Special::Blocks(axis),
        _ => return None,
    })
}

fn immediate(text: &str) -> Option<u64> {
    let hex = |digits: &str, len: usize| {
        let whole = digits.len() == len;
        u64::from_str_radix(digits, 16).ok().filter(|_| whole)
    };
    if let Some(digits) = text.strip_prefix("0f").or_else(|| text.strip_prefix("0F")) {
        return hex(digits, 8);
    }
    if let Some(digits) = text.strip_prefix("0d").or_else(|| text.strip_prefix("0D")) {
        return hex(digits, 16);
    }
    let (negative, number) = text.strip_prefix('-').map_or((false, text), |number| (true, number));
    let number = number.strip_suffix('U').unwrap_or(number);
    let value = match number.strip_prefix("0x").or_else(|| number.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok()?,
        None => number.parse().ok()?,
    };
    Some(if negative { value.wrapping_neg() } else { value })
}

fn comparison(name: &str) -> Option<Comparison> {
    Some(match name {
        "eq" => Comparison::Equal,
        "ne" => Comparison::NotEqual,
        "lt" | "lo" => Comparison::Less,
        "le" | "ls" => Comparison::LessOrEqual,
        "gt" | "hi" => Comparison::Greater,
        "ge" | "hs" => Comparison::GreaterOrEqual,
        _ => return None,
    })
}

fn binary(name: &str, parts: &[&str]) -> Option<Binary> {
    let has = |part: &str| parts.contains(&part);
    Some(match name {
        "add" => Binary::Add,
        "sub" => Binary::Subtract,
        "mul" if has("wide") => Binary::MultiplyWide,
        "mul" if has("hi") => Binary::MultiplyHigh,
        "mul" => Binary::Multiply,
        "div" => Binary::Divide,
        "rem" => Binary::Remainder,
        "min" => Binary::Minimum,
        "max" => Binary::Maximum,
        "and" => Binary::And,
        "or" => Binary::Or,
        "xor" => Binary::Xor,
        "shl" => Binary::ShiftLeft,
        "shr" => Binary::ShiftRight,
        _ => return None,
    })
}
