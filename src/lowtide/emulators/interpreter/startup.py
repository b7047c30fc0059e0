# mypy: ignore-errors
# Run once in every new Python kernel: the extra representations E2B's interpreter gives its results.
def _lowtide_startup():
    import sys

    from IPython import get_ipython
    from IPython.core.formatters import BaseFormatter, JSONFormatter
    from traitlets import ObjectName, Unicode

    class DataFormatter(BaseFormatter):
        """A pandas DataFrame as plain columns."""

        format_type = Unicode("e2b/data")
        print_method = ObjectName("_repr_e2b_data_")
        _return_type = (dict, str)

        def __call__(self, thing):
            pandas = sys.modules.get("pandas")
            if pandas is None or not isinstance(thing, pandas.DataFrame):
                return super().__call__(thing)
            columns = thing.to_dict(orient="list")
            plain = lambda v: v.isoformat() if isinstance(v, pandas.Timestamp) else v  # noqa: E731
            return {name: [plain(value) for value in values] for name, values in columns.items()}

    class ChartFormatter(BaseFormatter):
        """A matplotlib figure as its data, where the package e2b-charts is installed."""

        format_type = Unicode("e2b/chart")
        print_method = ObjectName("_repr_e2b_chart_")
        _return_type = (dict, str)

        def __call__(self, thing):
            pyplot = sys.modules.get("matplotlib.pyplot")
            if pyplot is None or not isinstance(thing, pyplot.Figure):
                return super().__call__(thing)
            try:
                from e2b_charts import chart_figure_to_dict

                return chart_figure_to_dict(thing)
            except Exception:
                return None

    class WholeJSONFormatter(JSONFormatter):
        """Lists and dicts are JSON results, too, when they can be."""

        def __call__(self, thing):
            import json

            if isinstance(thing, list | dict):
                numpy = sys.modules.get("numpy")

                def plain(value):
                    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
                        return value.tolist()
                    raise TypeError

                try:
                    return json.loads(json.dumps(thing, default=plain)), {"expanded": True}
                except (TypeError, ValueError):
                    return None
            return super().__call__(thing)

    formatters = get_ipython().display_formatter
    for formatter in (DataFormatter(parent=formatters), ChartFormatter(parent=formatters)):
        formatters.formatters[formatter.format_type] = formatter
    formatters.formatters["application/json"] = WholeJSONFormatter(parent=formatters)

    class ImageHook:
        """Images that are shown or saved are results; Pillow is only touched when somebody imports it."""

        def find_spec(self, name, path=None, target=None):
            if name != "PIL.Image":
                return None
            import importlib.machinery

            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is None or spec.loader is None:
                return None
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                from IPython.display import display

                save = module.Image.save

                def show(image, *args, **kwargs):
                    display(image)

                def save_and_show(image, fp, format=None, **options):
                    if isinstance(fp, str):
                        display(image)
                    return save(image, fp, format, **options)

                module.Image.show = show
                module.Image.save = save_and_show

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, ImageHook())


_lowtide_startup()
del _lowtide_startup
