//! What our header declares and the backend does not use: it stays small only if somebody looks.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use proc_macro2::{TokenStream, TokenTree};

use super::{bindings_path, header};

/// The functions and constants of our header that no code of the backend names.
pub(super) fn unused(functions: &[String], constants: &[String]) -> Result<Vec<String>> {
    let bindings = bindings_path();
    let folder = bindings.parent().context("the bindings lie in a folder")?;
    let mut used = BTreeSet::new();
    for file in sources(folder)?.iter().filter(|file| **file != bindings) {
        let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        identifiers(&text, &mut used).with_context(|| format!("reading {}", file.display()))?;
    }
    // A constant may also be the length of an array in the header itself.
    let path = header();
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let lengths = |constant: &String| text.contains(&format!("[{constant}]"));
    let functions = functions.iter().filter(|function| !used.contains(*function));
    let constants = constants.iter().filter(|constant| !used.contains(*constant) && !lengths(constant));
    Ok(functions.chain(constants).cloned().collect())
}

/// The Rust files in a folder and below.
fn sources(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(sources(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(files)
}

/// The identifiers in a piece of Rust. Comments and strings are not code.
fn identifiers(text: &str, found: &mut BTreeSet<String>) -> Result<()> {
    fn collect(tokens: TokenStream, found: &mut BTreeSet<String>) {
        for token in tokens {
            match token {
                TokenTree::Group(group) => collect(group.stream(), found),
                TokenTree::Ident(name) => _ = found.insert(name.to_string()),
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
        }
    }
    let tokens = text.parse::<TokenStream>().map_err(|error| anyhow::anyhow!("{error}"))?;
    collect(tokens, found);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_strings_use_nothing() {
        let text = "//! aclInCode.\nconst LIST: &[&str] = &[\"aclInString\"]; // aclInRemark\n\
            /// aclInDocumentation\nfn call(acl: &Acl) { macro_call!(acl.aclInMacro); (acl.aclCalled)() }";
        let mut found = BTreeSet::new();
        identifiers(text, &mut found).unwrap();
        let found = found.iter().filter(|name| name.starts_with("acl")).collect::<Vec<_>>();
        assert_eq!(found, ["acl", "aclCalled", "aclInMacro"]);
    }
}
