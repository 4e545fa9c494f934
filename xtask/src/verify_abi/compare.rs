//! What of our interface another one lacks, and what it has otherwise.

use std::collections::BTreeMap;

use super::abi::{Abi, Function};

/// Whether names of arguments count. C passes them by their place; the names show when two of one type are swapped.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum ArgumentNames {
    Count,
    Ignored,
}

/// The outcome for one class of symbols.
#[derive(Debug)]
pub(crate) struct Class {
    /// What its symbols are.
    pub(crate) name: &'static str,
    /// How many we have.
    pub(crate) ours: usize,
    /// Those of ours that the other one lacks.
    pub(crate) absent: Vec<String>,
    pub(crate) different: Vec<Difference>,
}

/// A symbol that both have, and not alike.
#[derive(Debug)]
pub(crate) struct Difference {
    pub(crate) symbol: String,
    pub(crate) ours: String,
    pub(crate) theirs: String,
}

/// Compares all that we have with what the other one says of it.
pub(crate) fn compare(ours: &Abi, theirs: &Abi, names: ArgumentNames) -> [Class; 4] {
    [
        class("functions", &ours.functions, &theirs.functions, |function| shown(function, names)),
        class("constants", &ours.constants, &theirs.constants, number),
        class("enum values", &ours.values, &theirs.values, number),
        class("structs", &ours.structs, &theirs.structs, ToString::to_string),
    ]
}

fn class<T>(
    name: &'static str,
    ours: &BTreeMap<String, T>,
    theirs: &BTreeMap<String, T>,
    shown: impl Fn(&T) -> String,
) -> Class {
    let mut class = Class { name, ours: ours.len(), absent: Vec::new(), different: Vec::new() };
    for (symbol, our) in ours {
        let Some(their) = theirs.get(symbol) else {
            class.absent.push(symbol.clone());
            continue;
        };
        let (ours, theirs) = (shown(our), shown(their));
        if ours != theirs {
            class.different.push(Difference { symbol: symbol.clone(), ours, theirs });
        }
    }
    class
}

fn shown(function: &Function, names: ArgumentNames) -> String {
    match names {
        ArgumentNames::Count => function.to_string(),
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
