//! Comparison of our interface with another one: absent and different symbols.

use std::collections::BTreeMap;

use crate::abi::{Abi, Function};

/// Whether argument names are compared. C ignores them, but they reveal swapped arguments of equal type.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum ArgumentNames {
    Compared,
    Ignored,
}

/// The result for one class of symbols.
#[derive(Debug)]
pub(crate) struct Class {
    /// The name of the class.
    pub(crate) name: &'static str,
    /// Number of our symbols.
    pub(crate) ours: usize,
    /// Our symbols that the other interface lacks.
    pub(crate) absent: Vec<String>,
    pub(crate) different: Vec<Difference>,
}

/// A symbol that differs between the interfaces.
#[derive(Debug)]
pub(crate) struct Difference {
    pub(crate) symbol: String,
    pub(crate) ours: String,
    pub(crate) theirs: String,
}

/// Compares all symbols of our interface with the other interface.
pub(crate) fn compare(ours: &Abi, theirs: &Abi, names: ArgumentNames) -> [Class; 4] {
    [
        class("functions", &ours.functions, &theirs.functions, |function| signature(function, names)),
        class("constants", &ours.constants, &theirs.constants, number),
        class("enum values", &ours.values, &theirs.values, number),
        class("structs", &ours.structs, &theirs.structs, ToString::to_string),
    ]
}

fn class<T>(
    name: &'static str,
    ours: &BTreeMap<String, T>,
    theirs: &BTreeMap<String, T>,
    format: impl Fn(&T) -> String,
) -> Class {
    let mut class = Class { name, ours: ours.len(), absent: Vec::new(), different: Vec::new() };
    for (symbol, our) in ours {
        let Some(their) = theirs.get(symbol) else {
            class.absent.push(symbol.clone());
            continue;
        };
        let (ours, theirs) = (format(our), format(their));
        if ours != theirs {
            class.different.push(Difference { symbol: symbol.clone(), ours, theirs });
        }
    }
    class
}

fn signature(function: &Function, names: ArgumentNames) -> String {
    match names {
        ArgumentNames::Compared => function.to_string(),
        ArgumentNames::Ignored => {
            let arguments = function.arguments.iter().map(|(_, of_type)| (String::new(), of_type.clone()));
            Function { arguments: arguments.collect(), result: function.result.clone() }.to_string()
        }
    }
}

fn number(value: &i128) -> String {
    value.to_string()
}

#[cfg(test)]
mod tests;
