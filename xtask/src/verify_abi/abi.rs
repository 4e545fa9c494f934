//! What bindings say of an interface: signatures, numbers and layouts, read out of bindgen's Rust.
//!
//! Two headers may say the same in different words: `#define` or a constant, an `enum` with a name or a `typedef`. What
//! bindgen makes of them differs in its types and its order, and here it comes out alike.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use syn::{BinOp, Expr, Fields, GenericArgument, ImplItem, Item, Lit, PathArguments, ReturnType, Type, UnOp};

/// An interface, by the names in it.
#[derive(Debug, Default)]
pub(crate) struct Abi {
    pub(crate) functions: BTreeMap<String, Function>,
    pub(crate) constants: BTreeMap<String, i128>,
    /// By `type::value`.
    pub(crate) values: BTreeMap<String, i128>,
    pub(crate) structs: BTreeMap<String, Structure>,
    /// All types: those of structures, enumerations, handles, and mere names for others.
    pub(crate) types: Vec<String>,
}

/// A function's type.
#[derive(Debug)]
pub(crate) struct Function {
    /// Names and types.
    pub(crate) arguments: Vec<(String, String)>,
    pub(crate) result: String,
}

/// A structure's layout, in bytes.
#[derive(Debug, PartialEq)]
pub(crate) struct Structure {
    pub(crate) size: i128,
    pub(crate) alignment: i128,
    pub(crate) fields: Vec<Field>,
}

/// A field's place, in bytes, and its type.
#[derive(Debug, PartialEq)]
pub(crate) struct Field {
    pub(crate) name: String,
    pub(crate) offset: i128,
    pub(crate) of_type: String,
}

/// The name of the table of functions.
const TABLE: &str = "Acl";

/// Begins the name of every type of the vendor's.
const PREFIX: &str = "acl";

impl Abi {
    /// Reads what bindgen made.
    ///
    /// # Errors
    ///
    /// Where something is there that it does not understand: what is passed over would not be compared.
    pub(crate) fn read(bindings: &str) -> Result<Self> {
        let file = syn::parse_file(bindings).context("bindgen's Rust does not parse")?;
        let types = Types::of(&file.items);
        let layouts = layouts(&file.items)?;
        let mut abi = Self { types: types.names(), ..Self::default() };
        for item in &file.items {
            match item {
                Item::Const(item) if item.ident == "_" => {}
                Item::Const(item) => {
                    let name = item.ident.to_string();
                    let value = number(&item.expr).with_context(|| format!("the value of {name}"))?;
                    abi.constants.insert(name, value);
                }
                Item::Struct(item) if item.ident == TABLE => abi.functions = functions(&item.fields, &types)?,
                Item::Struct(item) => {
                    if let Fields::Named(fields) = &item.fields {
                        let name = item.ident.to_string();
                        let structure = structure(&name, fields, &types, &layouts)?;
                        abi.structs.insert(name, structure);
                    }
                }
                Item::Impl(item) => abi.values.extend(values(&item.self_ty, &item.items)?),
                Item::Type(_) => {}
                _ => bail!("bindgen made something that is not understood here"),
            }
        }
        ensure!(!abi.functions.is_empty(), "there is no function");
        Ok(abi)
    }
}

/// The types that have names.
#[derive(Default)]
struct Types<'a> {
    /// Other names for types.
    aliases: BTreeMap<String, &'a Type>,
    /// Types of their own around another one: enumerations and handles.
    newtypes: BTreeMap<String, &'a Type>,
    structs: Vec<String>,
}

impl<'a> Types<'a> {
    fn of(items: &'a [Item]) -> Self {
        let mut types = Self::default();
        for item in items {
            match item {
                Item::Type(item) => _ = types.aliases.insert(item.ident.to_string(), &item.ty),
                Item::Struct(item) => match &item.fields {
                    Fields::Unnamed(fields) if fields.unnamed.len() == 1 => {
                        types.newtypes.insert(item.ident.to_string(), &fields.unnamed[0].ty);
                    }
                    _ => types.structs.push(item.ident.to_string()),
                },
                _ => {}
            }
        }
        types
    }

    fn names(&self) -> Vec<String> {
        let names = self.aliases.keys().chain(self.newtypes.keys()).chain(&self.structs);
        names.filter(|name| name.starts_with(PREFIX)).cloned().collect()
    }

    /// A type by what a compiler makes of it. A name stays only where it keeps things apart that look alike: an
    /// enumeration from a number, an event from a stream.
    fn shown(&self, of: &Type) -> Result<String> {
        match of {
            Type::Ptr(pointer) => {
                let access = if pointer.mutability.is_some() { "mut" } else { "const" };
                Ok(format!("*{access} {}", self.shown(&pointer.elem)?))
            }
            Type::Array(array) => Ok(format!("[{}; {}]", self.shown(&array.elem)?, number(&array.len)?)),
            Type::BareFn(function) => Ok(self.function(function)?.to_string()),
            Type::Path(path) => self.named(path),
            Type::Paren(inner) => self.shown(&inner.elem),
            Type::Group(inner) => self.shown(&inner.elem),
            _ => bail!("a type that is not understood here"),
        }
    }

    fn named(&self, path: &syn::TypePath) -> Result<String> {
        let last = path.path.segments.last().context("a type without a name")?;
        let name = last.ident.to_string();
        if name == "Option" {
            // A pointer to a function, which may be null.
            return self.shown(first_argument(&last.arguments)?);
        }
        if let Some(other) = self.aliases.get(&name) {
            return self.shown(other);
        }
        if let Some(inner) = self.newtypes.get(&name) {
            return Ok(format!("{name} ({})", self.shown(inner)?));
        }
        if self.structs.contains(&name) {
            return Ok(format!("struct {name}"));
        }
        // On the machines that ACL runs on.
        Ok(match name.as_str() {
            "c_void" => "void",
            "c_char" => "char",
            "c_schar" => "i8",
            "c_uchar" => "u8",
            "c_short" => "i16",
            "c_ushort" => "u16",
            "c_int" => "i32",
            "c_uint" => "u32",
            "c_long" | "c_longlong" => "i64",
            "c_ulong" | "c_ulonglong" => "u64",
            "usize" => "u64",
            "isize" => "i64",
            "i8" | "u8" | "i16" | "u16" | "i32" | "u32" | "i64" | "u64" | "f32" | "f64" | "bool" => &name,
            _ => bail!("the type {name:?} is not understood here"),
        }
        .to_owned())
    }

    fn function(&self, function: &syn::TypeBareFn) -> Result<Function> {
        let arguments = function.inputs.iter().map(|argument| {
            let name = argument.name.as_ref().map_or(String::new(), |(name, _)| name.to_string());
            Ok((name, self.shown(&argument.ty)?))
        });
        let result = match &function.output {
            ReturnType::Default => "nothing".to_owned(),
            ReturnType::Type(_, result) => self.shown(result)?,
        };
        ensure!(function.variadic.is_none(), "a function with any number of arguments");
        Ok(Function { arguments: arguments.collect::<Result<_>>()?, result })
    }
}

impl std::fmt::Display for Function {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("(")?;
        for (index, (name, of_type)) in self.arguments.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            let colon = if name.is_empty() { "" } else { ": " };
            write!(formatter, "{comma}{name}{colon}{of_type}")?;
        }
        write!(formatter, ") -> {}", self.result)
    }
}

impl std::fmt::Display for Structure {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} bytes, aligned to {}:", self.size, self.alignment)?;
        for Field { name, offset, of_type } in &self.fields {
            write!(formatter, " {name} at {offset}: {of_type};")?;
        }
        Ok(())
    }
}

/// The functions in bindgen's table, where each is a field: a `Result` with a pointer to it.
fn functions(fields: &Fields, types: &Types<'_>) -> Result<BTreeMap<String, Function>> {
    let fields = fields.iter().filter_map(|field| Some((field.ident.as_ref()?.to_string(), &field.ty)));
    let fields = fields.filter(|(name, _)| name != "__library");
    let functions = fields.map(|(name, of_type)| {
        let function = pointed_at(of_type).and_then(|function| types.function(function));
        let function = function.with_context(|| format!("the type of {name}"))?;
        Ok((name, function))
    });
    functions.collect()
}

fn pointed_at(of_type: &Type) -> Result<&syn::TypeBareFn> {
    let Type::Path(path) = of_type else { bail!("not a Result") };
    let last = path.path.segments.last().context("a type without a name")?;
    match first_argument(&last.arguments)? {
        Type::BareFn(function) => Ok(function),
        _ => bail!("not a Result with a pointer to a function"),
    }
}

fn first_argument(arguments: &PathArguments) -> Result<&Type> {
    let PathArguments::AngleBracketed(arguments) = arguments else { bail!("a type without an argument") };
    match arguments.args.first() {
        Some(GenericArgument::Type(first)) => Ok(first),
        _ => bail!("a type whose argument is not a type"),
    }
}

/// The numbers of an enumeration: `const NAME: Type = Type(number)`.
fn values(of: &Type, items: &[ImplItem]) -> Result<BTreeMap<String, i128>> {
    let Type::Path(path) = of else { bail!("an implementation for something without a name") };
    let name = path.path.segments.last().context("a type without a name")?.ident.to_string();
    let mut values = BTreeMap::new();
    for item in items {
        let ImplItem::Const(item) = item else { continue };
        let value = match &item.expr {
            Expr::Call(call) if call.args.len() == 1 => number(&call.args[0]),
            other => number(other),
        };
        let value = value.with_context(|| format!("the value of {name}::{}", item.ident))?;
        values.insert(format!("{name}::{}", item.ident), value);
    }
    Ok(values)
}

fn structure(
    name: &str,
    fields: &syn::FieldsNamed,
    types: &Types<'_>,
    layouts: &BTreeMap<String, i128>,
) -> Result<Structure> {
    let layout = |what: String| {
        layouts.get(&what).copied().with_context(|| format!("bindgen does not state the {what:?}"))
    };
    let fields = fields.named.iter().map(|field| {
        let field_name = field.ident.as_ref().context("a field without a name")?.to_string();
        Ok(Field {
            offset: layout(format!("Offset of field: {name}::{field_name}"))?,
            of_type: types.shown(&field.ty).with_context(|| format!("the type of {name}::{field_name}"))?,
            name: field_name,
        })
    });
    Ok(Structure {
        size: layout(format!("Size of {name}"))?,
        alignment: layout(format!("Alignment of {name}"))?,
        fields: fields.collect::<Result<_>>()?,
    })
}

/// What bindgen asserts of layouts, by its own words: `["Size of x"][size_of::<x>() - 8usize]`.
fn layouts(items: &[Item]) -> Result<BTreeMap<String, i128>> {
    let mut layouts = BTreeMap::new();
    for item in items {
        let Item::Const(item) = item else { continue };
        let Expr::Block(block) = &*item.expr else { continue };
        for statement in &block.block.stmts {
            let syn::Stmt::Expr(Expr::Index(index), _) = statement else {
                bail!("not a statement on a layout")
            };
            let (Expr::Array(words), Expr::Binary(difference)) = (&*index.expr, &*index.index) else {
                bail!("not a statement on a layout")
            };
            let Some(Expr::Lit(words)) = words.elems.first() else { bail!("a layout without words") };
            let Lit::Str(words) = &words.lit else { bail!("a layout without words") };
            ensure!(matches!(difference.op, BinOp::Sub(_)), "a layout without a difference");
            layouts.insert(words.value(), number(&difference.right)?);
        }
    }
    Ok(layouts)
}

fn number(expression: &Expr) -> Result<i128> {
    match expression {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Int(number) => Ok(number.base10_parse()?),
            _ => bail!("not a number"),
        },
        Expr::Unary(unary) if matches!(unary.op, UnOp::Neg(_)) => Ok(-number(&unary.expr)?),
        _ => bail!("not a number"),
    }
}
