//! Checks of the lists of functions in `backend-ascend/src/symbols.rs`.
//!
//! `REQUIRED` lists functions that every supported CANN must have. The other lists contain optional functions, which only have
//! to be declared.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, bail, ensure};
use syn::{Expr, Item, Lit};

use crate::workspace::root;

const FILE: &str = "backend-ascend/src/symbols.rs";

/// The name of the list of functions that the older headers must have.
pub(super) const REQUIRED: &str = "REQUIRED";

/// Lists of functions by the name of the constant.
pub(super) type Lists = BTreeMap<String, Vec<String>>;

/// Reads the lists from the file.
pub(super) fn read() -> Result<Lists> {
    let text = fs::read_to_string(root().join(FILE)).with_context(|| format!("cannot read {FILE}"))?;
    let lists = parse(&text).with_context(|| format!("cannot read {FILE}"))?;
    ensure!(
        lists.contains_key(REQUIRED),
        "{FILE} must contain `const {REQUIRED}: &[&str] = &[\"aclInit\", …]`, the functions that every CANN has"
    );
    Ok(lists)
}

/// Parses the constants that are lists.
fn parse(text: &str) -> Result<Lists> {
    let mut lists = Lists::new();
    for item in syn::parse_file(text)?.items {
        let (name, value) = match &item {
            Item::Const(item) => (item.ident.to_string(), &*item.expr),
            Item::Static(item) => (item.ident.to_string(), &*item.expr),
            _ => continue,
        };
        let value = match value {
            Expr::Reference(reference) => &*reference.expr,
            other => other,
        };
        if let Expr::Array(list) = value {
            let names = list.elems.iter().map(string).collect::<Result<_>>();
            lists.insert(name.clone(), names.with_context(|| format!("cannot parse the list {name}"))?);
        }
    }
    Ok(lists)
}

fn string(element: &Expr) -> Result<String> {
    let Expr::Lit(literal) = element else { bail!("an element is not a string literal") };
    match &literal.lit {
        Lit::Str(name) => Ok(name.value()),
        _ => bail!("an element is not a string literal"),
    }
}

/// Returns the mismatches of the lists: names that we do not declare, and required functions that the older headers lack.
pub(super) fn mismatches(lists: &Lists, ours: &[&String], absent_in_older: &[String]) -> Vec<String> {
    let mut mismatches = Vec::new();
    for (list, names) in lists {
        for name in names {
            if !ours.contains(&name) {
                mismatches.push(format!("{list} in {FILE} contains {name}, which include/acl.h does not declare; declare or remove it"));
            } else if list == REQUIRED && absent_in_older.contains(name) {
                mismatches.push(format!(
                    "{list} in {FILE} contains {name}, which the older headers lack; make it optional"
                ));
            }
        }
    }
    mismatches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_returns_all_lists() {
        let text = "//! Why.\npub(crate) const REQUIRED: &[&str] = &[\"aclInit\", \"aclrtMalloc\"];\n\
            static OTHER: [&str; 1] = [\n    \"aclrtFree\",\n];\nconst NUMBER: u32 = 1;\nfn other() {}";
        let lists = parse(text).unwrap();
        assert_eq!(lists.len(), 2);
        assert_eq!(lists[REQUIRED], ["aclInit", "aclrtMalloc"]);
        assert_eq!(lists["OTHER"], ["aclrtFree"]);
        let error = format!("{:#}", parse("const REQUIRED: &[&str] = &[NAME];").unwrap_err());
        assert!(error.contains("REQUIRED") && error.contains("not a string literal"), "{error}");
    }

    #[test]
    fn required_functions_must_be_declared_and_available() {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let ours = names(&["aclInit", "aclrtIpcMemClose"]);
        let ours = ours.iter().collect::<Vec<_>>();
        let absent = names(&["aclrtIpcMemClose"]);
        let lists = |list: &str, functions: &[&str]| Lists::from([(list.to_owned(), names(functions))]);
        assert_eq!(mismatches(&lists(REQUIRED, &["aclInit"]), &ours, &absent), [""; 0]);
        assert_eq!(mismatches(&lists("OTHER", &["aclInit", "aclrtIpcMemClose"]), &ours, &absent), [""; 0]);
        let mismatch = mismatches(&lists(REQUIRED, &["aclInit", "aclrtIpcMemClose"]), &ours, &absent);
        assert_eq!(mismatch.len(), 1);
        assert!(mismatch[0].contains("aclrtIpcMemClose") && mismatch[0].contains("optional"));
        for list in [REQUIRED, "OTHER"] {
            let unknown = mismatches(&lists(list, &["aclUnknown"]), &ours, &absent);
            assert_eq!(unknown.len(), 1);
            assert!(unknown[0].contains("aclUnknown") && unknown[0].contains("does not declare"));
        }
    }
}
