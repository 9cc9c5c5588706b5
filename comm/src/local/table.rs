//! Where members find the operation that they mean.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::identity::Company;
use super::operation::Operation;
use super::post::{MOST_PLACES, Post};
use crate::GroupId;
use crate::sync::Mutex;

/// Groups that keep operations that are over, as memory for others: those beyond keep none.
const KEEPING: usize = 1 << 10;

/// The posts of all groups of a world.
///
/// No other lock is taken while one of a post is held, except that of the status; none while the table's is held.
#[derive(Debug, Default)]
pub(crate) struct Table {
    posts: Mutex<BTreeMap<GroupId, Arc<Post>>>,
}

impl Table {
    /// Where the operations of a group meet, made if it is its first.
    pub(crate) fn post(&self, company: Company) -> Arc<Post> {
        let mut posts = self.posts.lock();
        let places = if posts.len() < KEEPING { MOST_PLACES } else { 0 };
        let post = posts.entry(company.group);
        Arc::clone(post.or_insert_with(|| Arc::new(Post::new(company, places))))
    }

    /// Nobody is to arrive any more.
    pub(crate) fn remove(&self, operation: &Operation) {
        if let Some(post) = self.post_of(operation) {
            post.remove(operation.number());
        }
    }

    /// A member goes without its output: the operation will not be over.
    pub(crate) fn forsake(&self, operation: &Arc<Operation>) {
        if let Some(post) = self.post_of(operation) {
            post.forsake(operation);
        }
    }

    /// Takes out the operations of `epoch`, or of all.
    pub(crate) fn drain(&self, epoch: Option<u64>) -> Vec<Arc<Operation>> {
        in_order(self.posts().iter().flat_map(|post| post.drain(epoch)).collect())
    }

    /// All operations that are there now.
    pub(crate) fn snapshot(&self) -> Vec<Arc<Operation>> {
        in_order(self.posts().iter().flat_map(|post| post.snapshot()).collect())
    }

    fn post_of(&self, operation: &Operation) -> Option<Arc<Post>> {
        self.posts.lock().get(&operation.key().group).cloned()
    }

    fn posts(&self) -> Vec<Arc<Post>> {
        self.posts.lock().values().cloned().collect()
    }
}

/// Operations in the order of their keys: the first of them may be named in an error.
fn in_order(mut operations: Vec<Arc<Operation>>) -> Vec<Arc<Operation>> {
    operations.sort_unstable_by_key(|operation| operation.key());
    operations
}
