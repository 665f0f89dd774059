//! The imports between the files of one crate, each resolved to the file that defines the name, through re-exports and
//! from a module to its children. Test code is left out.

mod tree;
mod uses;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use tree::{Crate, Target};
use uses::{Imported, for_tests, imported};

/// For each file, the files that it imports from.
pub(crate) type Graph = BTreeMap<PathBuf, BTreeSet<PathBuf>>;

/// Reads a file, if there is one.
pub(crate) type Read<'a> = &'a dyn Fn(&Path) -> Option<String>;

pub(crate) struct Imports {
    pub(crate) files: Graph,
    /// Paths inside the crate that could not be resolved, whose imports are therefore missing.
    pub(crate) lost: Vec<String>,
}

/// The imports of the crate whose root module is in the file `root`.
pub(crate) fn imports(root: &Path, read: Read<'_>) -> Imports {
    let tree = Crate::read(root, read);
    let (mut files, mut lost) = (Graph::new(), Vec::new());
    for (here, module) in tree.modules.iter().enumerate() {
        let mut found = Paths { tree: &tree, here, files: BTreeSet::new(), lost: Vec::new() };
        module.items.iter().for_each(|item| found.visit_item(item));
        found.files.remove(&module.file);
        lost.extend(found.lost.iter().map(|path| format!("{}: {path}", module.file.display())));
        files.entry(module.file.clone()).or_default().extend(found.files);
    }
    Imports { files, lost }
}

/// Collects the files that the paths of a module lead to.
struct Paths<'a> {
    tree: &'a Crate,
    here: usize,
    files: BTreeSet<PathBuf>,
    lost: Vec<String>,
}

impl Paths<'_> {
    fn follow(&mut self, path: &[String]) {
        let targets = self.tree.resolve(self.here, path, &mut BTreeSet::new());
        if targets.is_empty() && ["crate", "self", "super"].contains(&path[0].as_str()) {
            self.lost.push(path.join("::"));
        }
        for target in targets {
            if let Target::Item(module) = target {
                self.files.insert(self.tree.modules[module].file.clone());
            }
        }
    }

    /// Follows the paths in the tokens of a macro or an attribute.
    fn scan(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    if colons != 2 {
                        self.end(&mut path);
                    }
                    path.push(name.to_string());
                    colons = 0;
                }
                TokenTree::Punct(mark) if mark.as_char() == ':' => colons += 1,
                TokenTree::Group(group) => {
                    self.end(&mut path);
                    self.scan(group.stream());
                    colons = 0;
                }
                _ => {
                    self.end(&mut path);
                    colons = 0;
                }
            }
        }
        self.end(&mut path);
    }

    fn end(&mut self, path: &mut Vec<String>) {
        if path.len() > 1 {
            self.follow(path);
        }
        path.clear();
    }
}

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !for_tests(uses::attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !for_tests(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if !for_tests(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    /// A re-export does not count as an import: a user of the name imports from the file that defines it.
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if matches!(item.vis, syn::Visibility::Inherited) {
            for Imported { path, .. } in imported(item) {
                self.follow(&path);
            }
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            let names: Vec<_> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.follow(&names);
        }
        visit::visit_path(self, path);
    }

    /// `pub(in path)` does not count as an import.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.visit_path(&call.path);
        self.scan(call.tokens.clone());
    }

    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        if let syn::Meta::List(list) = &attribute.meta {
            self.scan(list.tokens.clone());
        }
    }
}
