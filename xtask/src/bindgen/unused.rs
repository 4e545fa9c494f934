//! Detection of declarations in our header that the backend does not use.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use proc_macro2::{TokenStream, TokenTree};

use super::{bindings_path, header};

/// Returns the functions and constants of our header that the backend does not use.
pub(super) fn unused(functions: &[String], constants: &[String]) -> Result<Vec<String>> {
    let bindings = bindings_path();
    let directory = bindings.parent().context("the bindings have a parent directory")?;
    let mut used = BTreeSet::new();
    for file in sources(directory)?.iter().filter(|file| **file != bindings) {
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        identifiers(&text, &mut used).with_context(|| format!("cannot read {}", file.display()))?;
    }
    // A constant may be used as the length of an array in the header.
    let path = header();
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let lengths = |constant: &String| text.contains(&format!("[{constant}]"));
    let functions = functions.iter().filter(|function| !used.contains(*function));
    let constants = constants.iter().filter(|constant| !used.contains(*constant) && !lengths(constant));
    Ok(functions.chain(constants).cloned().collect())
}

/// Returns the Rust files in a directory and its subdirectories.
fn sources(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(sources(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(files)
}

/// Collects the identifiers in Rust code, without comments and strings.
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
    fn comments_and_strings_are_not_uses() {
        let text = "//! aclInCode.\nconst LIST: &[&str] = &[\"aclInString\"]; // aclInComment\n\
            /// aclInDocumentation\nfn call(acl: &Acl) { macro_call!(acl.aclInMacro); (acl.aclCalled)() }";
        let mut found = BTreeSet::new();
        identifiers(text, &mut found).unwrap();
        let found = found.iter().filter(|name| name.starts_with("acl")).collect::<Vec<_>>();
        assert_eq!(found, ["acl", "aclCalled", "aclInMacro"]);
    }
}
