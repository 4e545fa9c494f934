//! Which functions the backend cannot do without: `REQUIRED` in `backend-ascend/src/symbols.rs`.
//!
//! The other lists in that file name functions that may be missing, with consequences. Here they only have to exist.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, bail, ensure};
use syn::{Expr, Item, Lit};

use crate::workspace::root;

const FILE: &str = "backend-ascend/src/symbols.rs";

/// The list of functions that the older headers have to have.
pub(super) const REQUIRED: &str = "REQUIRED";

/// Lists of functions, by the names of the constants.
pub(super) type Lists = BTreeMap<String, Vec<String>>;

/// The lists in the file.
pub(super) fn read() -> Result<Lists> {
    let text = fs::read_to_string(root().join(FILE)).with_context(|| format!("reading {FILE}"))?;
    let lists = parse(&text).with_context(|| format!("reading {FILE}"))?;
    ensure!(
        lists.contains_key(REQUIRED),
        "{FILE} has to hold `const {REQUIRED}: &[&str] = &[\"aclInit\", …]`, the functions that every CANN has"
    );
    Ok(lists)
}

/// The constants that are lists.
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
            lists.insert(name.clone(), names.with_context(|| format!("the list {name}"))?);
        }
    }
    Ok(lists)
}

fn string(element: &Expr) -> Result<String> {
    let Expr::Lit(literal) = element else { bail!("an element is not a string") };
    match &literal.lit {
        Lit::Str(name) => Ok(name.value()),
        _ => bail!("an element is not a string"),
    }
}

/// What is wrong with the lists: names that we do not declare, and required functions that the older headers lack.
pub(super) fn complaints(lists: &Lists, ours: &[&String], absent_in_older: &[String]) -> Vec<String> {
    let mut complaints = Vec::new();
    for (list, names) in lists {
        for name in names {
            if !ours.contains(&name) {
                complaints.push(format!("{list} in {FILE} has {name}, which include/acl.h does not declare"));
            } else if list == REQUIRED && absent_in_older.contains(name) {
                complaints.push(format!(
                    "{list} in {FILE} has {name}, which the older headers lack: make it optional"
                ));
            }
        }
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_they_stand() {
        let text = "//! Why.\npub(crate) const REQUIRED: &[&str] = &[\"aclInit\", \"aclrtMalloc\"];\n\
            static OTHER: [&str; 1] = [\n    \"aclrtFree\",\n];\nconst NUMBER: u32 = 1;\nfn other() {}";
        let lists = parse(text).unwrap();
        assert_eq!(lists.len(), 2);
        assert_eq!(lists[REQUIRED], ["aclInit", "aclrtMalloc"]);
        assert_eq!(lists["OTHER"], ["aclrtFree"]);
        let error = format!("{:#}", parse("const REQUIRED: &[&str] = &[NAME];").unwrap_err());
        assert!(error.contains("REQUIRED") && error.contains("not a string"), "{error}");
    }

    #[test]
    fn what_is_required_has_to_be_declared_and_in_the_older_headers() {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let ours = names(&["aclInit", "aclrtIpcMemClose"]);
        let ours = ours.iter().collect::<Vec<_>>();
        let absent = names(&["aclrtIpcMemClose"]);
        let lists = |list: &str, functions: &[&str]| Lists::from([(list.to_owned(), names(functions))]);
        assert_eq!(complaints(&lists(REQUIRED, &["aclInit"]), &ours, &absent), [""; 0]);
        assert_eq!(complaints(&lists("OTHER", &["aclInit", "aclrtIpcMemClose"]), &ours, &absent), [""; 0]);
        let later = complaints(&lists(REQUIRED, &["aclInit", "aclrtIpcMemClose"]), &ours, &absent);
        assert_eq!(later.len(), 1);
        assert!(later[0].contains("aclrtIpcMemClose") && later[0].contains("optional"));
        for list in [REQUIRED, "OTHER"] {
            let unknown = complaints(&lists(list, &["aclNobody"]), &ours, &absent);
            assert_eq!(unknown.len(), 1);
            assert!(unknown[0].contains("aclNobody") && unknown[0].contains("does not declare"));
        }
    }
}
