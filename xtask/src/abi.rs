//! The ABI of an interface: signatures, constants and layouts, parsed from bindgen's output.
//!
//! Two headers may declare the same ABI in different ways: by `#define` or a constant, by a named `enum` or a `typedef`.
//! The output of bindgen then differs in types and order; this representation does not.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use syn::{BinOp, Expr, Fields, GenericArgument, ImplItem, Item, Lit, PathArguments, ReturnType, Type, UnOp};

/// An interface, by symbol name.
#[derive(Debug, Default)]
pub(crate) struct Abi {
    pub(crate) functions: BTreeMap<String, Function>,
    pub(crate) constants: BTreeMap<String, i128>,
    /// Enumeration values by `type::value`.
    pub(crate) values: BTreeMap<String, i128>,
    pub(crate) structs: BTreeMap<String, Structure>,
    /// All types: structures, enumerations, handles and aliases.
    pub(crate) types: Vec<String>,
}

/// The type of a function.
#[derive(Debug)]
pub(crate) struct Function {
    /// Names and types.
    pub(crate) arguments: Vec<(String, String)>,
    pub(crate) result: String,
}

/// The layout of a structure, in bytes.
#[derive(Debug, PartialEq)]
pub(crate) struct Structure {
    pub(crate) size: i128,
    pub(crate) alignment: i128,
    pub(crate) fields: Vec<Field>,
}

/// The offset in bytes and the type of a field.
#[derive(Debug, PartialEq)]
pub(crate) struct Field {
    pub(crate) name: String,
    pub(crate) offset: i128,
    pub(crate) of_type: String,
}

/// The name of bindgen's table of functions.
const TABLE: &str = "Acl";

/// The prefix of all type names of the vendor.
const PREFIX: &str = "acl";

impl Abi {
    /// Parses the output of bindgen.
    ///
    /// # Errors
    ///
    /// Fails for an item that is not supported, because a skipped item would not be compared.
    pub(crate) fn read(bindings: &str) -> Result<Self> {
        let file = syn::parse_file(bindings).context("cannot parse the output of bindgen")?;
        let types = NamedTypes::of(&file.items);
        let layouts = layouts(&file.items)?;
        let mut abi = Self { types: types.names(), ..Self::default() };
        for item in &file.items {
            match item {
                Item::Const(item) if item.ident == "_" => {}
                Item::Const(item) => {
                    let name = item.ident.to_string();
                    let value =
                        number(&item.expr).with_context(|| format!("cannot parse the value of {name}"))?;
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
                _ => bail!("not supported: an item of this kind in the output of bindgen"),
            }
        }
        ensure!(!abi.functions.is_empty(), "the output of bindgen contains no functions");
        Ok(abi)
    }
}

/// The named types.
#[derive(Default)]
struct NamedTypes<'a> {
    /// Type aliases.
    aliases: BTreeMap<String, &'a Type>,
    /// Newtypes: enumerations and handles.
    newtypes: BTreeMap<String, &'a Type>,
    structs: Vec<String>,
}

impl<'a> NamedTypes<'a> {
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

    /// Returns the canonical form of a type. Names remain only where they distinguish types with equal representation: an
    /// enumeration from a number, an event from a stream.
    fn canonical(&self, of: &Type) -> Result<String> {
        match of {
            Type::Ptr(pointer) => {
                let access = if pointer.mutability.is_some() { "mut" } else { "const" };
                Ok(format!("*{access} {}", self.canonical(&pointer.elem)?))
            }
            Type::Array(array) => Ok(format!("[{}; {}]", self.canonical(&array.elem)?, number(&array.len)?)),
            Type::BareFn(function) => Ok(self.function(function)?.to_string()),
            Type::Path(path) => self.named(path),
            Type::Paren(inner) => self.canonical(&inner.elem),
            Type::Group(inner) => self.canonical(&inner.elem),
            _ => bail!("not supported: a type of this kind"),
        }
    }

    fn named(&self, path: &syn::TypePath) -> Result<String> {
        let last = path.path.segments.last().context("not supported: a type without a name")?;
        let name = last.ident.to_string();
        if name == "Option" {
            // A nullable function pointer.
            return self.canonical(first_argument(&last.arguments)?);
        }
        if let Some(other) = self.aliases.get(&name) {
            return self.canonical(other);
        }
        if let Some(inner) = self.newtypes.get(&name) {
            return Ok(format!("{name} ({})", self.canonical(inner)?));
        }
        if self.structs.contains(&name) {
            return Ok(format!("struct {name}"));
        }
        // The C types of the targets that ACL supports.
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
            _ => bail!("not supported: the type {name:?}"),
        }
        .to_owned())
    }

    fn function(&self, function: &syn::TypeBareFn) -> Result<Function> {
        let arguments = function.inputs.iter().map(|argument| {
            let name = argument.name.as_ref().map_or(String::new(), |(name, _)| name.to_string());
            Ok((name, self.canonical(&argument.ty)?))
        });
        let result = match &function.output {
            ReturnType::Default => "void".to_owned(),
            ReturnType::Type(_, result) => self.canonical(result)?,
        };
        ensure!(function.variadic.is_none(), "not supported: a variadic function");
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
        write!(formatter, "{} B, alignment {} B:", self.size, self.alignment)?;
        for Field { name, offset, of_type } in &self.fields {
            write!(formatter, " {name} at {offset}: {of_type};")?;
        }
        Ok(())
    }
}

/// Returns the functions in bindgen's table, whose fields are of the form `Result<fn pointer, _>`.
fn functions(fields: &Fields, types: &NamedTypes<'_>) -> Result<BTreeMap<String, Function>> {
    let fields = fields.iter().filter_map(|field| Some((field.ident.as_ref()?.to_string(), &field.ty)));
    let fields = fields.filter(|(name, _)| name != "__library");
    let functions = fields.map(|(name, of_type)| {
        let function = function_type(of_type).and_then(|function| types.function(function));
        let function = function.with_context(|| format!("cannot parse the type of {name}"))?;
        Ok((name, function))
    });
    functions.collect()
}

fn function_type(of_type: &Type) -> Result<&syn::TypeBareFn> {
    let Type::Path(path) = of_type else { bail!("the field is not a Result") };
    let last = path.path.segments.last().context("not supported: a type without a name")?;
    match first_argument(&last.arguments)? {
        Type::BareFn(function) => Ok(function),
        _ => bail!("the field is not a Result with a function pointer"),
    }
}

fn first_argument(arguments: &PathArguments) -> Result<&Type> {
    let PathArguments::AngleBracketed(arguments) = arguments else { bail!("the type has no argument") };
    match arguments.args.first() {
        Some(GenericArgument::Type(first)) => Ok(first),
        _ => bail!("the argument is not a type"),
    }
}

/// Returns the values of an enumeration: `const NAME: Type = Type(number)`.
fn values(of: &Type, items: &[ImplItem]) -> Result<BTreeMap<String, i128>> {
    let Type::Path(path) = of else { bail!("not supported: an implementation for an unnamed type") };
    let name = path.path.segments.last().context("not supported: a type without a name")?.ident.to_string();
    let mut values = BTreeMap::new();
    for item in items {
        let ImplItem::Const(item) = item else { continue };
        let value = match &item.expr {
            Expr::Call(call) if call.args.len() == 1 => number(&call.args[0]),
            other => number(other),
        };
        let value = value.with_context(|| format!("cannot parse the value of {name}::{}", item.ident))?;
        values.insert(format!("{name}::{}", item.ident), value);
    }
    Ok(values)
}

fn structure(
    name: &str,
    fields: &syn::FieldsNamed,
    types: &NamedTypes<'_>,
    layouts: &BTreeMap<String, i128>,
) -> Result<Structure> {
    let layout = |key: String| {
        layouts.get(&key).copied().with_context(|| format!("{key:?} not found in the output of bindgen"))
    };
    let fields = fields.named.iter().map(|field| {
        let field_name = field.ident.as_ref().context("not supported: a field without a name")?.to_string();
        Ok(Field {
            offset: layout(format!("Offset of field: {name}::{field_name}"))?,
            of_type: types
                .canonical(&field.ty)
                .with_context(|| format!("cannot parse the type of {name}::{field_name}"))?,
            name: field_name,
        })
    });
    Ok(Structure {
        size: layout(format!("Size of {name}"))?,
        alignment: layout(format!("Alignment of {name}"))?,
        fields: fields.collect::<Result<_>>()?,
    })
}

/// Returns the layouts that bindgen asserts, by the text of the assertion: `["Size of x"][size_of::<x>() - 8usize]`.
fn layouts(items: &[Item]) -> Result<BTreeMap<String, i128>> {
    let mut layouts = BTreeMap::new();
    for item in items {
        let Item::Const(item) = item else { continue };
        let Expr::Block(block) = &*item.expr else { continue };
        for statement in &block.block.stmts {
            let syn::Stmt::Expr(Expr::Index(index), _) = statement else {
                bail!("not supported: a statement that is not a layout assertion")
            };
            let (Expr::Array(texts), Expr::Binary(difference)) = (&*index.expr, &*index.index) else {
                bail!("not supported: a statement that is not a layout assertion")
            };
            let Some(Expr::Lit(text)) = texts.elems.first() else {
                bail!("not supported: a layout assertion without text")
            };
            let Lit::Str(text) = &text.lit else { bail!("not supported: a layout assertion without text") };
            ensure!(
                matches!(difference.op, BinOp::Sub(_)),
                "not supported: a layout assertion without a difference"
            );
            layouts.insert(text.value(), number(&difference.right)?);
        }
    }
    Ok(layouts)
}

fn number(expression: &Expr) -> Result<i128> {
    match expression {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Int(number) => Ok(number.base10_parse()?),
            _ => bail!("not an integer literal"),
        },
        Expr::Unary(unary) if matches!(unary.op, UnOp::Neg(_)) => Ok(-number(&unary.expr)?),
        _ => bail!("not an integer literal"),
    }
}
