"""Upload an exported folder to the Hugging Face Hub.

Paths of this machine are removed from the uploaded `trimtab.json`; the model card has none.
"""

import json
import re
from pathlib import Path
from typing import Any

from trimtab.checkpoint.export import FACTS, read_facts
from trimtab.checkpoint.model_card import public_facts
from trimtab.errors import ModelError, RecipeError, as_argument, summarize_error

_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class HubRepository:
    """A model repository on the Hub, which is created as a private one if it does not exist.

    Args:
        name: USER/NAME.
        api: The Hub's client, a `huggingface_hub.HfApi`; by default one with the user's login.

    Raises:
        RecipeError: The name is not the name of a repository.
        ModelError: The Hub cannot be reached, or the user has not logged in.
    """

    def __init__(self, name: str, api: Any = None) -> None:
        if not _NAME.fullmatch(name):
            raise RecipeError(f"--push {name} is not the name of a repository", "--push USER/NAME")
        self.name = name
        if api is None:
            from huggingface_hub import HfApi

            api = HfApi()
        self._api: Any = api
        self._call("whoami", "log in with `hf auth login`, check the connection, or leave out --push")

    def upload(self, folder: Path) -> str:
        """Upload a folder, and return the address of the repository.

        Raises:
            ModelError: The upload failed; the folder is not changed.
        """
        cure = f"the model is in {folder}; push it later: hf upload {self.name} {as_argument(folder)}"
        self._call("create_repo", cure, repo_id=self.name, private=True, exist_ok=True)
        about = {"repo_id": self.name, "commit_message": "Export of trimtab"}
        facts = json.dumps(public_facts(read_facts(folder)), indent=1, ensure_ascii=False)
        self._call("upload_folder", cure, folder_path=str(folder), ignore_patterns=[FACTS], **about)
        self._call("upload_file", cure, path_or_fileobj=facts.encode(), path_in_repo=FACTS, **about)
        return f"{getattr(self._api, 'endpoint', '')}/{self.name}"

    def _call(self, method: str, cure: str, **arguments: Any) -> Any:
        from huggingface_hub.errors import HfHubHTTPError

        try:
            return getattr(self._api, method)(**arguments)
        except (HfHubHTTPError, OSError, ValueError) as error:  # OSError: no connection, offline mode, no token
            raise ModelError(f"the Hub refused {method} for {self.name}: {summarize_error(error)}", cure) from error
